"""Planted causes of whole scripts as users write them, and healthy scripts, for `planted_causes`."""

# ruff: noqa: E501  # a program is a row

from __future__ import annotations

from benchmarks.planted_loops import PLANTED

_AUGMENTED = f"""
def augment(image):
    if np.random.rand() < 0.5: image = image[:, ::-1]
    top, left = np.random.randint(0, 8, 2)
    image = np.pad(image, ((4, 4), (4, 4), (0, 0)))[top : top + 32, left : left + 32]{PLANTED}
    return torch.from_numpy(((image / 255.0 - 0.5) / 0.25).astype(np.float32)).permute(2, 0, 1)
images, labels = np.random.randint(0, 256, (2000, 32, 32, 3), np.uint8), torch.randint(0, 10, (2000,))
model = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(14):
    ids = np.random.randint(0, 2000, 128)
    batch = torch.stack([augment(images[k]) for k in ids])
    train(model, batch, labels[ids])
"""
_NEXT_ITER = f"""
class Rows(Dataset):
    def __init__(self): self.x, self.y = torch.randn(400_000, 32), torch.randint(0, 10, (400_000,))
    def __len__(self): return 400_000
    def __getitem__(self, i): return self.x[i], self.y[i]
loader = DataLoader(Rows(), batch_size=64, shuffle=True); model = perceptron(32, 2); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(14):
    x, y = next(iter(loader)){PLANTED}
    train(model, x, y)
"""
_CONFUSION = f"""
matrix = torch.zeros(10, 10)
x, y = torch.randn(512, 256), torch.randint(0, 10, (512,))
for i in range(14):
    logits = model(x)
    loss = F.cross_entropy(logits, y); loss.backward(); optimizer.step(); optimizer.zero_grad()
    for a, b in zip(y, logits.argmax(1)):
        matrix[a, b] += 1{PLANTED}
"""
_COLLATE = f"""
texts = ["The quick brown fox jumps over the lazy dog, and " * 12] * 2048; vocabulary = {{}}
class Texts(Dataset):
    def __len__(self): return 2048
    def __getitem__(self, i): return texts[i], i % 10
def tokenise(text): return [vocabulary.setdefault(word, len(vocabulary) + 1) for word in re.findall(r"\\w+|[^\\w\\s]", text.lower())]
def collate(rows):
    ids = [torch.tensor(tokenise(text)) for text, _ in rows]
    return nn.utils.rnn.pad_sequence(ids, batch_first=True), torch.tensor([label for _, label in rows])
class Bag(nn.Module):
    def __init__(self): super().__init__(); self.embedding, self.head = nn.Embedding(1000, 64), nn.Linear(64, 10)
    def forward(self, ids): return self.head(self.embedding(ids).mean(1))
model = Bag(); optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
for i, (ids, y) in zip(range(14), DataLoader(Texts(), batch_size=64, collate_fn=collate)):{PLANTED}
    train(model, ids, y)
"""
_AGENT = f"""
class Pole:
    def __init__(self): self.state = [0.0, 0.0, 0.05, 0.0]
    def step(self, action):
        x, v, angle, spin = self.state
        for _ in range(20): x, v, angle, spin = x + 1e-3 * v, v + 1e-3 * (action - angle), angle + 1e-3 * spin, spin + 1e-3 * (angle - action)
        self.state = [x, v, angle, spin]
        return self.state, 1.0 - abs(angle)
policy = nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)); optimizer = torch.optim.Adam(policy.parameters(), lr=1e-3, fused=True)
for episode in range(14):
    env, state, chances, rewards = Pole(), [0.0] * 4, [], []
    for t in range(100):
        dist = torch.distributions.Categorical(logits=policy(torch.tensor(state))){PLANTED}
        action = dist.sample(); chances.append(dist.log_prob(action))
        state, reward = env.step(action.item()); rewards.append(reward)
    loss = -(torch.stack(chances) * torch.tensor(rewards)).sum(); loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_LOGGED = f"""
log = open("metrics.jsonl", "a")
def record(step, loss):
    log.write(json.dumps(dict(step=step, loss=loss)) + "\\n"); log.flush(); os.fsync(log.fileno()){PLANTED}
for i in range(30):
    loss = F.cross_entropy(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad(); record(i, loss.item())
"""
_STATE_COPIED = f"""
model = perceptron(1024, 3); optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, fused=True); x = torch.randn(32, 1024); best, least = None, 1e9
for i in range(14):
    loss = F.cross_entropy(model(x), y[:32]); loss.backward(); optimizer.step(); optimizer.zero_grad()
    if loss.item() < least: least, best = loss.item(), (copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())){PLANTED}
"""
_NOT_FROZEN = f"""
backbone, head = perceptron(1024, 4)[:-1], nn.Linear(1024, 10); x = torch.randn(256, 1024); y = torch.randint(0, 10, (256,))
optimizer = torch.optim.SGD(head.parameters(), lr=1e-2)
for i in range(14):
    loss = F.cross_entropy(head(backbone(x)), y); loss.backward(){PLANTED}
    optimizer.step(); optimizer.zero_grad()
"""
_SAMPLE_BY_SAMPLE = f"""
x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))
for i in range(14):
    for a, b in zip(x, y):
        loss = F.cross_entropy(model(a[None]), b[None]) / 64{PLANTED}
        loss.backward()
    optimizer.step(); optimizer.zero_grad()
"""
_OUTPUTS_KEPT = f"""
model = perceptron(1024, 2); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); outputs, x = [], torch.randn(512, 1024); y = torch.randint(0, 10, (512,))
body, head = model[:-1], model[-1]
for i in range(14):
    features = body(x); outputs.append(features){PLANTED}
    loss = F.cross_entropy(head(features), y); loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_MANY_WORKERS = f"""
class Heavy(Dataset):
    def __len__(self): return 4096
    def __getitem__(self, i): return torch.tensor([sum(range(3000)) % 7.0] * 256), sum(k * k for k in range(4000)) % 10
for i, (x, y) in zip(range(40), DataLoader(Heavy(), batch_size=64, num_workers=8)):{PLANTED}
    train(x=x, y=y)
"""
_ORDER_SHUFFLED = f"""
import random
order = list(range(300_000))
for i in range(14):
    random.shuffle(order){PLANTED}
    train(x=torch.randn(64, 256))
"""
_HISTORY_STACKED = f"""
history = [torch.rand(()) for _ in range(20_000)]
for i in range(14):
    loss = F.cross_entropy(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()
    history.append(loss.detach()); mean = torch.stack(history).mean(){PLANTED}
"""
_HALF = f"""
model = perceptron(512, 3).half(); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); x = torch.randn(128, 512).half(); y = torch.randint(0, 10, (128,))
for i in range(14):
    loss = F.cross_entropy(model(x).float(), y){PLANTED}
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_BAG = f"""
embedding, head = nn.Embedding(2000, 256), nn.Linear(256, 10); optimizer = torch.optim.SGD([*embedding.parameters(), *head.parameters()], lr=1e-2); ids, y = torch.randint(0, 2000, (64, 400)), torch.randint(0, 10, (64,))
for i in range(14):
    h = embedding(ids).mean(1){PLANTED}
    loss = F.cross_entropy(head(h), y); loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_MANY_GROUPS = f"""
layers = nn.Sequential(*[nn.Linear(96, 96) for _ in range(60)]); optimizer = torch.optim.AdamW([dict(params=[p], weight_decay=0.01 * (p.ndim > 1)) for p in layers.parameters()], lr=1e-3)
x = torch.randn(64, 96)
for i in range(14):
    layers(x).square().mean().backward()
    optimizer.step(){PLANTED}
    optimizer.zero_grad()
"""
_DATA_REORDERED = f"""
data, labels = torch.randn(60_000, 256), torch.randint(0, 10, (60_000,))
for i in range(14):
    order = torch.randperm(60_000)
    data, labels = data[order], labels[order]{PLANTED}
    train(x=data[:64], y=labels[:64])
"""
_NPZ = f"""
model = perceptron(512, 2); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); x = torch.randn(64, 512)
for i in range(14):
    train(model, x, y)
    np.savez_compressed("weights.npz", **{{name: value.detach().numpy() for name, value in model.named_parameters()}}){PLANTED}
"""
_IMAGES_READ = f"""
for k in range(64): np.save(f"image{{k}}.npy", np.random.randint(0, 256, (256, 256, 3), np.uint8))
for i in range(14):
    images = np.stack([np.load(f"image{{k}}.npy") for k in range(64)]){PLANTED}
    train(x=torch.from_numpy(images[:, :16, :16, 0].reshape(64, 256) / 255.0).float())
"""
_CLASSES_ONE_BY_ONE = f"""
model = perceptron(256, 2)[:-1].append(nn.Linear(256, 80)); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); wanted = (torch.rand(64, 80) > 0.9).float()
for i in range(14):
    logits = model(x); loss = 0
    for c in range(80): loss = loss + F.binary_cross_entropy_with_logits(logits[:, c], wanted[:, c]) / 80{PLANTED}
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_POOL_OF_PROCESSES = f"""
import multiprocessing
def letters(text): return sum(letter.isalpha() for letter in text)
pool = multiprocessing.get_context("fork").Pool(2)
for i in range(20):
    counts = pool.map(letters, ["a word, and more! " * 200] * 64){PLANTED}
    train()
"""
_NORMS_READ = f"""
model = perceptron(384, 12); optimizer = torch.optim.AdamW(model.parameters(), fused=True); x = torch.randn(64, 384); norms = {{}}
for i in range(14):
    F.cross_entropy(model(x), y).backward()
    for name, p in model.named_parameters():
        for kind, z in (("weight", p.detach()), ("grad", p.grad)): norms[name, kind] = (z.mean().item(), z.std().item(), z.abs().max().item(), z.norm().item()){PLANTED}
    optimizer.step(); optimizer.zero_grad()
"""
_DISTILLED = """
teacher, student = perceptron(1024, 6), perceptron(512, 3); teacher.requires_grad_(False); optimizer = torch.optim.AdamW(student.parameters(), fused=True); x = torch.randn(512, 1024)
for i in range(14):
    with torch.no_grad(): wanted = teacher(x).softmax(-1)
    loss = F.kl_div(student(x[:, :512]).log_softmax(-1), wanted, reduction="batchmean"); loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_TARGET_NETWORK = """
value = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 8)); target = copy.deepcopy(value); optimizer = torch.optim.Adam(value.parameters(), fused=True)
states, nexts, actions, rewards = torch.randn(20_000, 64), torch.randn(20_000, 64), torch.randint(0, 8, (20_000,)), torch.randn(20_000)
for i in range(20):
    rows = torch.randint(0, 20_000, (512,))
    with torch.no_grad(): wanted = rewards[rows] + 0.99 * target(nexts[rows]).amax(1)
    loss = F.smooth_l1_loss(value(states[rows]).gather(1, actions[rows, None])[:, 0], wanted)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    if i % 10 == 0: target.load_state_dict(value.state_dict())
"""
_DIFFUSION = """
model = nn.Sequential(nn.Conv2d(3, 48, 3, padding=1), nn.GroupNorm(8, 48), nn.SiLU(), nn.Conv2d(48, 48, 3, padding=1), nn.SiLU(), nn.Conv2d(48, 3, 3, padding=1)); optimizer = torch.optim.AdamW(model.parameters(), fused=True)
images, alphas = torch.randn(256, 3, 32, 32), torch.linspace(0.99, 0.01, 1000)
for i in range(14):
    clean = images[torch.randint(0, 256, (16,))]; t = torch.randint(0, 1000, (16,)); a = alphas[t].view(-1, 1, 1, 1)
    noise = torch.randn_like(clean)
    loss = F.mse_loss(model(a.sqrt() * clean + (1 - a).sqrt() * noise), noise); loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_CACHED_GENERATION = """
class Block(nn.Module):
    def __init__(self): super().__init__(); self.qkv, self.out, self.up, self.down = nn.Linear(1024, 3072), nn.Linear(1024, 1024), nn.Linear(1024, 4096), nn.Linear(4096, 1024)
    def forward(self, h, cache, at):
        q, k, v = self.qkv(h).view(h.shape[0], 1, 3, 8, 128).unbind(2)
        cache[0][:, at], cache[1][:, at] = k[:, 0], v[:, 0]
        a = F.scaled_dot_product_attention(q.transpose(1, 2), cache[0][:, : at + 1].transpose(1, 2), cache[1][:, : at + 1].transpose(1, 2))
        h = h + self.out(a.transpose(1, 2).flatten(2)); return h + self.down(F.gelu(self.up(h)))
class Decoder(nn.Module):
    def __init__(self): super().__init__(); self.embedding, self.blocks, self.head = nn.Embedding(2000, 1024), nn.ModuleList([Block() for _ in range(4)]), nn.Linear(1024, 2000)
    def forward(self, ids, caches, at):
        h = self.embedding(ids)
        for block, cache in zip(self.blocks, caches): h = block(h, cache, at)
        return self.head(h)[:, -1]
decoder = Decoder().eval(); ids = torch.zeros(16, 1, dtype=torch.long); caches = [torch.zeros(2, 16, 64, 8, 128) for _ in range(4)]; made = torch.zeros(16, 64, dtype=torch.long)
with torch.inference_mode():
    for at in range(30):
        ids = decoder(ids, caches, at).argmax(-1, keepdim=True); made[:, at] = ids[:, 0]
"""
_EPOCHS = """
from torch.utils.data import TensorDataset
train_set, test_set = TensorDataset(torch.randn(4096, 784), torch.randint(0, 10, (4096,))), TensorDataset(torch.randn(512, 784), torch.randint(0, 10, (512,)))
loader, test = DataLoader(train_set, batch_size=256, shuffle=True), DataLoader(test_set, batch_size=256)
model = nn.Sequential(nn.Linear(784, 1024), nn.ReLU(), nn.Dropout(0.1), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)); optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for epoch in range(3):
    model.train()
    for step, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()
        if step % 10 == 0: print(f"{epoch} {step} {loss.item():.3f}", flush=True)
    model.eval()
    with torch.no_grad(): right = sum((model(x).argmax(1) == y).sum().item() for x, y in test)
    torch.save(model.state_dict(), "last.pt")
"""
SCRIPTS: dict[str, tuple[str, str]] = {
    "images augmented one by one": (_AUGMENTED, "A loop of small calls"),
    "an iterator in each step": (_NEXT_ITER, "Choosing the next batch"),
    "a matrix of confusion": (_CONFUSION, "A loop of small calls"),
    "texts cut while batches are made": (_COLLATE, "Waiting for data"),
    "one environment at a time": (_AGENT, "A loop of small calls"),
    "a log that reaches the disk": (_LOGGED, "Writing"),
    "the best state copied": (_STATE_COPIED, "deepcopy()"),
    "a body that is not frozen": (_NOT_FROZEN, "Computing gradients that nothing reads"),
    "samples one by one": (_SAMPLE_BY_SAMPLE, "A loop of small calls"),
    "outputs that are kept": (_OUTPUTS_KEPT, "Memory of the CPU grows"),
    "more workers than cores": (_MANY_WORKERS, "Waiting for data"),
    "a list that is shuffled": (_ORDER_SHUFFLED, "random.shuffle()"),
    "a history that is stacked": (_HISTORY_STACKED, "Copying a tensor (.stack())"),
    "float16 on a CPU": (_HALF, "Computing in float16"),
    "rows of an embedding that are averaged": (_BAG, "The gradient of an embedding"),
    "an optimizer of many groups": (_MANY_GROUPS, "The optimizer's step"),
    "all data in a new order": (_DATA_REORDERED, "Computing beside the training"),
    "weights that are compressed": (_NPZ, "Writing"),
    "images read in each step": (_IMAGES_READ, "Reading"),
    "a loss for each class": (_CLASSES_ONE_BY_ONE, "A loop of small calls"),
    "a pool of processes": (_POOL_OF_PROCESSES, "Waiting for another process"),
    "statistics of each parameter": (_NORMS_READ, "A loop of small calls"),
    "healthy: distilled": (_DISTILLED, "Nothing stands out"),
    "healthy: target network": (_TARGET_NETWORK, "Nothing stands out"),
    "healthy: diffusion": (_DIFFUSION, "Nothing stands out"),
    "healthy: cached generation": (_CACHED_GENERATION, "Nothing stands out"),
    "healthy: epochs": (_EPOCHS, "Nothing stands out"),
}  # fmt: skip
