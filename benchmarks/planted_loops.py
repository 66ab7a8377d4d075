"""Planted causes of training and serving loops as people write them, and healthy loops, for `planted_causes`."""

# ruff: noqa: E501  # a program is a row

from __future__ import annotations

PLANTED = "  # planted"
"""At the end of the line that a verdict shall name."""


def loop(line: str, before: str = "", steps: int = 14) -> str:
    return f"{before}\nfor i in range({steps}):\n    {line}{PLANTED}\n    train()\n"


_ZERO_GRAD = f"""
model = perceptron(2048, 2); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); x, y = torch.randn(2, 2048), y[:2]
for i in range(14):
    optimizer.zero_grad(set_to_none=False){PLANTED}
    loss = F.cross_entropy(model(x), y); loss.backward(); optimizer.step()
"""
_TOKENS = """
texts = ["a word, and more of them! " * 60] * 16; vocabulary = {word: k for k, word in enumerate(("a", "word", "and", "more", "of", "them", ",", "!"))}
embedding = nn.Embedding(16, 256)
for i in range(14):
    ids = [[vocabulary.get(word, 9) for word in re.findall(r"\\w+|[^\\w\\s]", text.lower())] for text in texts]  # planted
    train(x=embedding(torch.tensor(ids)[:, :4]).flatten(0, 1), y=y)
"""
_OPTIMIZER = f"""
model = perceptron(1024, 3); x = torch.randn(4, 1024)
for i in range(14):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True){PLANTED}
    train(model, x, y[:4])
"""
_AVERAGED = f"""
weights = [nn.Parameter(torch.randn(8)) for _ in range(400)]; averages = [p.detach().clone() for p in weights]; optimizer = torch.optim.SGD(weights, lr=1e-3, foreach=True)
for i in range(14):
    torch.stack(weights).square().sum().backward()
    optimizer.step(); optimizer.zero_grad()
    for p, q in zip(weights, averages): q.mul_(0.999).add_(p.detach(), alpha=0.001){PLANTED}
"""
_STATES = f"""
model = perceptron(1024, 3); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); x = torch.randn(2, 1024)
for i in range(14):
    best = {{name: value.clone() for name, value in model.state_dict().items()}}{PLANTED}
    train(model, x, y[:2])
"""
_GROWING = f"""
keys = torch.randn(1, 4000, 256)
for i in range(14):
    token = torch.randn(1, 1, 256)
    for layer in range(8):
        keys = torch.cat([keys, token], 1){PLANTED}
        token = token + 1e-3 * keys[:, -1:]
    train()
"""
_ONE_BY_ONE = f"""
for i in range(14):
    outputs = []
    for row in x:
        outputs.append(model(row[None])){PLANTED}
    loss = F.cross_entropy(torch.cat(outputs), y); loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_WEIGHTED = f"""
weights = np.random.rand(512, 4096); model = nn.Linear(64, 4096); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); x = torch.randn(512, 64)
for i in range(14):
    error = (model(x) - 1) * torch.from_numpy(weights){PLANTED}
    error.square().mean().backward(); optimizer.step(); optimizer.zero_grad()
"""
_LAID_OUT = f"""
convolution, images = nn.Conv2d(16, 16, 1), torch.randn(16, 16, 96, 96)
for i in range(14):
    image = images.to(memory_format=torch.channels_last){PLANTED}
    with torch.no_grad(): convolution(image[:1])
    train()
"""
_HEADS = f"""
x = torch.randn(16, 256, 128)
for i in range(14):
    q, k, v = [part.unflatten(-1, (8, 16)).transpose(1, 2).contiguous() for part in (x, x, x)]{PLANTED}
    train(x=(q[0] + k[0] + v[0])[:, :64, 0].repeat(8, 4)[:64])
"""
_UNUSED = f"""
class Branched(nn.Module):
    def __init__(self): super().__init__(); self.trunk, self.head, self.auxiliary = nn.Linear(256, 256), nn.Linear(256, 10), perceptron(512, 4); self.up = nn.Linear(256, 512)
    def forward(self, x):
        h = torch.relu(self.trunk(x))
        extra = self.auxiliary(self.up(h)){PLANTED}
        return self.head(h)
model = Branched(); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(14):
    train(model)
"""
_THREADS = f"""
torch.set_num_threads(32)
model = nn.Sequential(*[part for _ in range(12) for part in (nn.Linear(512, 512), nn.ReLU())]); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); x = torch.randn(128, 512)
for i in range(14):
    loss = model(x).square().mean(){PLANTED}
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_MODES = f"""
model = nn.Sequential(*[nn.Sequential(nn.Identity(), nn.Identity(), nn.Identity()) for _ in range(400)], nn.Linear(256, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(14):
    model.eval().train(){PLANTED}
    train(model[-1])
"""
_EMBEDDED = f"""
table, head = nn.Embedding(200_000, 64), nn.Linear(64, 10); optimizer = torch.optim.SGD([*table.parameters(), *head.parameters()], lr=1e-3); ids = torch.randint(0, 200_000, (64,))
for i in range(14):
    loss = F.cross_entropy(head(table(ids)), y){PLANTED}
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_HOOKED = """
seen = {}
def note(module, given, out): seen[module] = (out.mean().item(), out.std().item(), out.abs().max().item())  # planted
stem = nn.Sequential(*[nn.Identity() for _ in range(60)])
for layer in stem: layer.register_forward_hook(note)
for i in range(14):
    train(x=stem(x))
"""
_ORDERED = f"""
for i in range(14):
    order = torch.randperm(1_000_000){PLANTED}
    train(x=x[order[:64] % 64])
"""
_GIVEN = f"""
model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10)); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
images = np.random.rand(8, 128, 128, 3)
for i in range(14):
    batch = torch.tensor(images.transpose(0, 3, 1, 2), dtype=torch.float32){PLANTED}
    train(model[-1:], batch.mean((2, 3)).repeat(1, 6)[:, :16], y[:8])
"""
_ACCUMULATED = """
model = perceptron(512, 3); optimizer = torch.optim.AdamW(model.parameters(), fused=True); x, y = torch.randn(512, 512), torch.randint(0, 10, (512,))
for i in range(14):
    for part in range(4):
        loss = F.cross_entropy(model(x[128 * part : 128 * part + 128]), y[128 * part : 128 * part + 128]) / 4
        loss.backward()
    optimizer.step(); optimizer.zero_grad()
"""
_CLIPPED = """
model = nn.Sequential(*[part for _ in range(4) for part in (nn.Linear(512, 512), nn.LayerNorm(512), nn.GELU())], nn.Linear(512, 10)); optimizer = torch.optim.AdamW(model.parameters(), fused=True)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100); x, y = torch.randn(256, 512), torch.randint(0, 10, (256,)); total = torch.zeros(())
for i in range(14):
    loss = F.cross_entropy(model(x), y); loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step(); optimizer.zero_grad(); schedule.step(); total += loss.detach()
"""
_WORDS = """
embedding, convolution, head = nn.Embedding(5000, 128), nn.Conv1d(128, 256, 5), nn.Linear(256, 10); parts = nn.ModuleList([embedding, convolution, head])
optimizer = torch.optim.SGD(parts.parameters(), lr=1e-2, momentum=0.9); ids, y = torch.randint(0, 5000, (32, 256)), torch.randint(0, 10, (32,))
for i in range(14):
    loss = F.cross_entropy(head(F.relu(convolution(embedding(ids).mT)).amax(-1)), y); loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_CHECKED = f"""
class Checked(nn.Module):
    def forward(self, x):
        y = torch.relu(x)
        if torch.isnan(y).any() or torch.isinf(y).any(): raise ValueError("not finite"){PLANTED}
        return y
model = nn.Sequential(*[Checked() for _ in range(8)], nn.Linear(1024, 10)); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); x = torch.randn(512, 1024); y = torch.randint(0, 10, (512,))
for i in range(14):
    train(model, x, y)
"""
_TABLE = f"""
def table(length, width): return torch.sin(torch.arange(length)[:, None] / 10000 ** (torch.arange(width) / width)){PLANTED}
for i in range(14):
    train(x=x + table(4096, 256)[:64])
"""
_SAMPLED = f"""
from torch.utils.data import Sampler, TensorDataset
lengths = np.random.randint(4, 60, 20_000).tolist()
class Near(Sampler):
    def __iter__(self):
        for first in range(200): yield sorted(range(20_000), key=lambda k: abs(lengths[k] - lengths[first]))[:64]
data = TensorDataset(torch.randn(20_000, 256), torch.randint(0, 10, (20_000,)))
for i, (x, y) in zip(range(14), DataLoader(data, batch_sampler=Near())):{PLANTED}
    train(x=x, y=y)
"""
_EPOCHS = f"""
from torch.utils.data import TensorDataset
loader = DataLoader(TensorDataset(torch.randn(256, 256), torch.randint(0, 10, (256,))), batch_size=128, num_workers=1)
for epoch in range(10):
    for x, y in loader:{PLANTED}
        train(x=x, y=y)
"""
_FEATURES = f"""
layers = nn.ModuleList([nn.Linear(1, 8) for _ in range(128)]); optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3, foreach=True)
for i in range(14):
    parts = []
    for k, layer in enumerate(layers):
        parts.append(layer(x[:, k : k + 1])){PLANTED}
    torch.cat(parts, 1).square().mean().backward(); optimizer.step(); optimizer.zero_grad()
"""
_PENALTY = f"""
layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(120)]); optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3, foreach=True)
for i in range(14):
    loss = layers[0](x[:, :32]).square().mean()
    for p in layers.parameters(): loss = loss + 1e-4 * p.pow(2).sum(){PLANTED}
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_SEGMENTED = f"""
body, head = nn.Conv2d(3, 32, 3, stride=4, padding=1), nn.Conv2d(32, 5, 1); optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=1e-3)
images, masks = torch.randn(4, 3, 128, 128), torch.randint(0, 5, (4, 128, 128))
for i in range(14):
    h = F.interpolate(F.relu(body(images)), size=(128, 128), mode="bilinear"){PLANTED}
    loss = F.cross_entropy(head(h), masks); loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_PRODUCED = f"""
import queue, threading
batches = queue.Queue(maxsize=4)
def produce():
    while True:
        time.sleep(0.1)
        batches.put(torch.randn(64, 256))
threading.Thread(target=produce, daemon=True).start()
for i in range(30):
    x = batches.get(){PLANTED}
    train(x=x)
"""
_FEW_WORKERS = f"""
class Slow(Dataset):
    def __len__(self): return 4096
    def __getitem__(self, i): time.sleep(0.006); return torch.randn(256), i % 10
for i, (x, y) in zip(range(30), DataLoader(Slow(), batch_size=32, num_workers=2)):{PLANTED}
    train(x=x, y=y)
"""
_CAST = f"""
model = nn.Sequential(*[nn.Linear(1200, 1200, bias=False) for _ in range(4)]); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); x = torch.randn(2, 1200)
for i in range(14):
    for part in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(x).float().square().mean(){PLANTED}
        loss.backward()
    optimizer.step(); optimizer.zero_grad()
"""
_PAIRS = f"""
points = nn.Parameter(torch.randn(512, 64)); optimizer = torch.optim.SGD([points], lr=1e-3); z = torch.randn(256, 64)
for i in range(14):
    difference = z.unsqueeze(1) - points.unsqueeze(0){PLANTED}
    loss = difference.pow(2).sum(-1).min(1).values.mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_AVERAGE = f"""
model = perceptron(1024, 3); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); average = {{name: value.clone() for name, value in model.state_dict().items()}}
for i in range(14):
    train(model, torch.randn(4, 1024), y[:4])
    with torch.no_grad():
        for name, value in model.state_dict().items():
            average[name] = 0.999 * average[name] + 0.001 * value{PLANTED}
"""
_QUEUED = f"""
import multiprocessing
queue = multiprocessing.Queue(maxsize=2)
def produce():
    while True: queue.put(np.ones((64, 60_000), np.float32))
multiprocessing.Process(target=produce, daemon=True).start()
for i in range(20):
    rows = queue.get(){PLANTED}
    train(x=torch.from_numpy(rows[:, :256]))
"""
_POOLED = f"""
from concurrent.futures import ThreadPoolExecutor
pool = ThreadPoolExecutor(8)
def letters(text): return sum(letter.isalpha() for letter in text)
for i in range(20):
    counts = list(pool.map(letters, ["a word, and more! " * 60] * 64)){PLANTED}
    train()
"""
_SERVED = f"""
import http.server, threading, urllib.request
class Service(http.server.BaseHTTPRequestHandler):
    def do_GET(self): time.sleep(0.05); self.send_response(200); self.end_headers(); self.wfile.write(b"1")
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Service); threading.Thread(target=server.serve_forever, daemon=True).start()
for i in range(20):
    urllib.request.urlopen(f"http://127.0.0.1:{{server.server_port}}/").read(){PLANTED}
    train()
"""
_ADVERSARIES = """
made, judged = (nn.Sequential(nn.Linear(512, 1024), nn.ReLU(), nn.Linear(1024, last)) for last in (512, 1)); true = torch.randn(256, 512)
for_made, for_judged = (torch.optim.Adam(net.parameters(), fused=True) for net in (made, judged))
for i in range(16):
    fake = made(torch.randn(256, 512))
    (F.softplus(-judged(true)) + F.softplus(judged(fake.detach()))).mean().backward(); for_judged.step(); for_judged.zero_grad()
    F.softplus(-judged(fake)).mean().backward(); for_made.step(); for_made.zero_grad()
"""
_AGAIN = f"""
class Decoder(nn.Module):
    def __init__(self):
        super().__init__(); self.embedding, self.head = nn.Embedding(500, 256), nn.Linear(256, 500)
        self.layers = nn.ModuleList([nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(3)])
    def forward(self, ids):
        h = self.embedding(ids)
        for layer in self.layers: h = layer(h)
        return self.head(h[:, -1])
model, ids = Decoder().eval(), torch.randint(0, 500, (4, 64))
with torch.no_grad():
    for i in range(40):
        scores = model(ids){PLANTED}
        ids = torch.cat([ids, scores.argmax(-1, keepdim=True)], 1)
"""
_INFERRED = """
model = perceptron(1024, 4); total = torch.zeros(10)
with torch.inference_mode():
    for i in range(40): total += model(torch.randn(256, 1024)).softmax(-1).sum(0)
"""
CAUSES: dict[str, tuple[str, str]] = {
    "an einsum from the left": (loop("torch.einsum('ij,jk,bk->bi', a, a, v)", "torch.backends.opt_einsum.enabled = False\na, v = torch.randn(700, 700), torch.randn(4, 700)"), "Multiplying matrices in a costly order"),
    "a Jacobian": (loop("torch.autograd.functional.jacobian(net, z)", "net, z = nn.Sequential(nn.Linear(48, 64), nn.Tanh(), nn.Linear(64, 96)), torch.randn(48)"), "A Jacobian row by row"),
    "a queue of another process": (_QUEUED, "Waiting for another process"),
    "a pool of threads": (_POOLED, "Waiting in"),
    "a service": (_SERVED, "Waiting for the network"),
    "memory that is filled": (loop("z = torch.empty(8_000_000)", "torch.use_deterministic_algorithms(True)"), "Filling new memory"),
    "a sample of a deque": (loop("random.sample(memory, 512)", "import random; from collections import deque\nmemory = deque(range(100_000))"), "random.sample()"),
    "an unfolded image": (loop("(F.unfold(z, 5, padding=2).view(2, 8, 25, -1) * w).sum(2)", "z, w = torch.randn(2, 8, 96, 96), torch.randn(1, 1, 25, 1)"), "Unfolding an image"),
    "files that are looked at": (loop("sizes = [os.stat(path).st_size for path in paths]", "paths = [__file__] * 20_000"), "Looking at files"),
    "all tokens again": (_AGAIN, "Calling the model on all tokens again"),
    "healthy: adversaries": (_ADVERSARIES, "Nothing stands out"),
    "healthy: only forward": (_INFERRED, "Nothing stands out"),
    "a penalty by a loop": (_PENALTY, "A loop of small calls"),
    "an interpolation before the head": (_SEGMENTED, "Interpolating before a 1 × 1 convolution"),
    "a thread that makes batches": (_PRODUCED, "Waiting in get"),
    "too few workers": (_FEW_WORKERS, "Waiting for data"),
    "parameters cast by autocast": (_CAST, "Copying to another precision"),
    "all pairs, summed a line later": (_PAIRS, "Combining tensors by broadcasting"),
    "an average in new memory": (_AVERAGE, "Updating tensors beside the training"),
    "rows of a database": (loop("for k in range(30): database.execute('insert into loss values (?)', (k,)); database.commit()", "import sqlite3\ndatabase = sqlite3.connect('runs.db'); database.execute('create table loss (value real)')"), "A database"),
    "an event loop": (loop("asyncio.run(asyncio.sleep(0.03))", "import asyncio"), "Waiting in asyncio.run()"),
    "zero_grad to zeros": (_ZERO_GRAD, "zero_grad(set_to_none=False)"),
    "tokens": (_TOKENS, "A loop of small calls"),
    "an optimizer each step": (_OPTIMIZER, "Making an optimizer"),
    "histograms": (loop("for p in model.parameters(): np.histogram(p.detach().numpy(), 64)"), "A loop of small calls"),
    "averages by hand": (_AVERAGED, "A loop of small calls"),
    "a state each step": (_STATES, "Copying a tensor (.clone())"),
    "keys that grow": (_GROWING, "Copying a tensor (.cat())"),
    "rows one by one": (_ONE_BY_ONE, "A loop of small calls"),
    "products one by one": (loop("products = [a[k] @ b[k] for k in range(300)]", "a, b = torch.randn(300, 8, 8), torch.randn(300, 8, 8)"), "A loop of small calls"),
    "a checkpoint each step": (loop("torch.save(large.state_dict(), path)", "large, path = perceptron(1024, 4), '/dev/shm/planted' if os.path.isdir('/dev/shm') else 'planted'"), "Writing"),
    "weights of NumPy": (_WEIGHTED, "Computing in float64"),
    "a layout each step": (_LAID_OUT, "Copying a tensor (.to())"),
    "contiguous heads": (_HEADS, "Copying a tensor (.contiguous())"),
    "a branch that nothing reads": (_UNUSED, "A forward that no loss depends on"),
    "too many threads": (_THREADS, "Computing on too many threads"),
    "eval and train": (_MODES, "Going through a model's modules"),
    "a large embedding": (_EMBEDDED, "The gradient of an embedding"),
    "hooks that read": (_HOOKED, "A loop of small calls"),
    "an order of everything": (_ORDERED, "Drawing a random order"),
    "images of NumPy": (_GIVEN, "Copying a tensor (.tensor())"),
    "repeat": (loop("(z.repeat(64, 1, 1) * 2).sum()", "z = torch.randn(256, 256)"), "Copying a tensor (.repeat())"),
    "another program": (loop("subprocess.run(['true'])", "import subprocess"), "Waiting in run()"),
    "a trace each step": (loop("torch.jit.trace(model, x)"), "Tracing a model"),
    "decompressed": (loop("np.frombuffer(zlib.decompress(blob), np.float32)", "import zlib\nblob = zlib.compress(os.urandom(2_000_000) + bytes(8_000_000))"), "decompress()"),
    "rows of a table": (loop("rows = [dict(zip(names, row)) for row in table]", "names = [str(k) for k in range(20)]; table = [tuple(range(20))] * 3000"), "Python"),
    "values that are checked": (_CHECKED, "Checking values"),
    "a table made anew": (_TABLE, "Computing beside the training"),
    "noise of all": (loop("noisy = (z + 0.1 * torch.randn_like(z))[:64]", "z = torch.rand(20_000, 256)"), "Drawing random numbers"),
    "a slow sampler": (_SAMPLED, "Choosing the next batch"),
    "workers that start in each epoch": (_EPOCHS, "Waiting for data"),
    "a layer for each feature": (_FEATURES, "A loop of small calls"),
    "healthy: accumulated": (_ACCUMULATED, "Nothing stands out"),
    "healthy: clipped": (_CLIPPED, "Nothing stands out"),
    "healthy: words": (_WORDS, "Nothing stands out"),
}  # fmt: skip
