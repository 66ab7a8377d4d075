"""Programs with one planted cause each, and healthy ones: what does `tilewright profile` say first, and of which line?

python -m benchmarks.planted_causes [NAME…]

Each takes some seconds. Ends with exit code 1 if a verdict is not the planted one.
"""

# ruff: noqa: E501  # a program is a row

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from benchmarks.planted_loops import CAUSES
from benchmarks.planted_loops import PLANTED as _PLANTED
from benchmarks.planted_loops import loop as _loop
from benchmarks.planted_scripts import SCRIPTS

_START = """\
import copy, gc, json, logging, os, pickle, re, time
import numpy as np, torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset
torch.manual_seed(0); torch.set_num_threads(1)
def perceptron(width, layers):
    return nn.Sequential(*[part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())], nn.Linear(width, 10))
model = perceptron(256, 2); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x, y = torch.randn(64, 256), torch.randint(0, 10, (64,))
def train(model=model, x=x, y=y):
    loss = F.cross_entropy(model(x), y); loss.backward(); optimizer.step(); optimizer.zero_grad()
"""


class Program(NamedTuple):
    """A program's end, with the planted line marked, and the begin of the first sentence on it."""

    text: str
    said: str


_SLOW_DATA = f"""
class Slow(Dataset):
    def __len__(self): return 4096
    def __getitem__(self, i): {{0}}; return torch.randn(256), i % 10
for i, (x, y) in zip(range(14), DataLoader(Slow(), batch_size=32)):{_PLANTED}
    train(x=x, y=y)
"""
_ADAM = f"""
model = nn.Sequential(*[nn.Linear(64, 64) for _ in range(60)])
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
for i in range(14):
    model(x[:8, :64]).square().mean().backward()
    optimizer.step(){_PLANTED}
    optimizer.zero_grad()
"""
_DOUBLE = f"""
model = perceptron(1024, 2).double(); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x = torch.randn(256, 1024, dtype=torch.float64); y = torch.randint(0, 10, (256,))
for i in range(14):
    loss = F.cross_entropy(model(x), y){_PLANTED}
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_RECOMPILED = f"""
torch._dynamo.config.recompile_limit, torch._dynamo.config.automatic_dynamic_shapes = 1000, False
compiled = torch.compile(model, backend="aot_eager")
for i in range(14):
    loss = F.cross_entropy(compiled(torch.randn(16 + i, 256)), y[: 16 + i]){_PLANTED}
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_COUNTED = f"""
class Counting(nn.Module):
    def __init__(self):
        super().__init__(); self.inner = perceptron(256, 2); self.calls = 0
    def forward(self, x):
        self.calls += 1
        return self.inner(x) * (1 + 1e-3 * self.calls)
torch._dynamo.config.recompile_limit = 1000
model = Counting(); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); compiled = torch.compile(model, backend="aot_eager")
for i in range(14):
    loss = F.cross_entropy(compiled(x), y){_PLANTED}
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_ONE_HOT = f"""
table = nn.Parameter(torch.randn(20000, 64)); head = nn.Linear(64, 10); ids = torch.randint(0, 20000, (256,)); y = torch.randint(0, 10, (256,))
optimizer = torch.optim.SGD([table, *head.parameters()], lr=1e-3)
for i in range(14):
    hot = F.one_hot(ids, 20000).float(){_PLANTED}
    loss = F.cross_entropy(head(hot @ table), y); loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_COPIED = f"""
model = perceptron(1024, 3); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); x = torch.randn(2, 1024)
for i in range(14):
    best = copy.deepcopy(model){_PLANTED}
    train(model, x, y[:2])
"""
_KEPT = f"""
losses, x, y = [], torch.randn(512, 256), torch.randint(0, 10, (512,))
for i in range(14):
    loss = F.cross_entropy(model(x), y){_PLANTED}
    loss.backward(retain_graph=True); optimizer.step(); optimizer.zero_grad(); losses.append(loss)
"""
_ANOMALIES = f"""
torch.autograd.set_detect_anomaly(True)
model = nn.Sequential(*[part for _ in range(60) for part in (nn.Linear(64, 64), nn.Tanh())]); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(14):
    loss = model(x[:8, :64]).square().mean(){_PLANTED}
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_LOCKED = """
import threading
lock = threading.Lock()
def hold():
    while True:
        with lock: time.sleep(0.01)
        time.sleep(0.0005)
threading.Thread(target=hold, daemon=True).start()
"""
_EVALUATED = f"""
held = [(torch.randn(64, 256), torch.randint(0, 10, (64,))) for _ in range(20)]
def evaluate():
    model.eval()
    with torch.no_grad(): right = sum((model(x).argmax(1) == y).sum().item() for x, y in held){_PLANTED}
    model.train(); return right
for i in range(14):
    train(); evaluate()
"""
_CLIPPED = f"""
weights = [nn.Parameter(torch.randn(8)) for _ in range(400)]; optimizer = torch.optim.SGD(weights, lr=1e-3, foreach=True)
for i in range(14):
    torch.stack(weights).square().sum().backward()
    for p in weights: p.grad.mul_(min(1, 1 / (p.grad.norm().item() + 1e-6))){_PLANTED}
    optimizer.step(); optimizer.zero_grad()
"""
_CHECKPOINTED = f"""
from torch.utils.checkpoint import checkpoint
model = nn.Sequential(*[nn.Sequential(nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 512)) for _ in range(6)]); head = nn.Linear(512, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); x, y = torch.randn(256, 512), torch.randint(0, 10, (256,))
def forward(x):
    for layer in model: x = checkpoint(layer, x, use_reentrant=False){_PLANTED}
    return head(x)
for i in range(14):
    train(forward, x, y)
"""
_ZEROED = f"""
model = perceptron(2048, 2); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); x, y = torch.randn(2, 2048), y[:2]
for i in range(14):
    loss = F.cross_entropy(model(x), y); loss.backward(); optimizer.step()
    for p in model.parameters(): p.grad.zero_(){_PLANTED}
"""
_STARTED = f"""
class Rows(Dataset):
    def __len__(self): return 64
    def __getitem__(self, i): return torch.randn(256), i % 10
data = Rows()
for i in range(14):
    for x, y in DataLoader(data, batch_size=64, num_workers=1):{_PLANTED}
        train(x=x, y=y)
"""
_MASK = """
def mask_of(scores): return torch.tensor([[score.item() > 0.5 for score in row] for row in scores])  # planted
scores = torch.rand(64, 16)
for i in range(14):
    mask_of(scores); train()
"""
_TOKENS = "pieces = re.findall(r'\\w+|[^\\w\\s]', 'a word, and more! ' * 300)"
_COLUMN = f"""
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 1)); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
x, y = torch.randn(2048, 64), torch.randn(2048)
for i in range(14):
    loss = (model(x) - y).square().mean(){_PLANTED}
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_SCATTERED = f"""
project = nn.Linear(8000, 64, bias=False); optimizer = torch.optim.SGD(project.parameters(), lr=1e-3); ids = torch.randint(0, 8000, (512, 1))
for i in range(14):
    hot = torch.zeros(512, 8000){_PLANTED}
    hot.scatter_(1, ids, 1.0)
    project(hot[:8]).square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""
_BY_HAND = f"""
qkv = nn.Linear(64, 192); optimizer = torch.optim.SGD(qkv.parameters(), lr=1e-3); x = torch.randn(2, 512, 64)
mask = torch.full((512, 512), float("-inf")).triu(1)
for i in range(14):
    q, k, v = qkv(x).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
    y = (q @ k.mT / 4 + mask).softmax(-1) @ v{_PLANTED}
    y.square().mean().backward()
    optimizer.step(); optimizer.zero_grad()
"""
_BROKEN = f"""
class Noted(nn.Module):
    def __init__(self): super().__init__(); self.inner = nn.Linear(64, 64)
    def forward(self, x):
        h = torch.relu(self.inner(x))
        if h.mean().item() > 1e6: h = h / 2{_PLANTED}
        return h + x
model = torch.compile(nn.Sequential(*[Noted() for _ in range(30)]), backend="aot_eager"); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(20):
    loss = model(x[:16, :64]).square().mean()
    loss.backward()
    optimizer.step(); optimizer.zero_grad()
"""
_GRU = """
model, head = nn.GRU(128, 256, num_layers=2, batch_first=True), nn.Linear(256, 10); optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()], fused=True)
x, y = torch.randn(32, 24, 128), torch.randint(0, 10, (32,))
for i in range(14):
    loss = F.cross_entropy(head(model(x)[0][:, -1]), y); loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_WORKER = """
from torch.utils.data import TensorDataset
model = perceptron(1024, 3); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3); data = TensorDataset(torch.randn(4096, 1024), torch.randint(0, 10, (4096,)))
for i, (x, y) in zip(range(14), DataLoader(data, batch_size=256, num_workers=1)):
    train(model, x, y)
"""
_LSTM = """
model, head = nn.LSTM(256, 512, batch_first=True), nn.Linear(512, 10); optimizer = torch.optim.Adam([*model.parameters(), *head.parameters()])
x = torch.randn(64, 32, 256)
for i in range(14):
    loss = F.cross_entropy(head(model(x)[0][:, -1]), y); loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
_LOADED = """
class Plain(Dataset):
    def __init__(self): self.x, self.y = torch.randn(4096, 1024), torch.randint(0, 10, (4096,))
    def __len__(self): return 4096
    def __getitem__(self, i): return self.x[i], self.y[i]
model = perceptron(1024, 4); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for i, (x, y) in zip(range(14), DataLoader(Plain(), batch_size=128, shuffle=True)):
    train(model, x, y)
"""
_CONVOLUTIONS = """
model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(14):
    train(model, torch.randn(16, 3, 64, 64), y[:16])
"""
_TRANSFORMER = """
model = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True); optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(8, 128, 256)
for i in range(14):
    model(x).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
_WIDE = """
model = perceptron(1024, 3); optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
for i in range(14):
    train(model, torch.randn(512, 1024), torch.randint(0, 10, (512,)))
"""
_FILE = "path = '/dev/shm/planted' if os.path.isdir('/dev/shm') else 'planted'\nopen(path, 'wb').write(os.urandom(30_000_000))"
PROGRAMS = {
    "sleep": Program(_loop("time.sleep(0.01)"), "time.sleep"),
    "data that waits": Program(_SLOW_DATA.format("time.sleep(0.002)"), "Waiting for data"),
    "data that computes": Program(_SLOW_DATA.format("sorted(range(60_000), key=str)"), "Waiting for data"),
    "print": Program(_loop("print(z, z.sum(), file=null)", "z, null = torch.randn(9, 900), open(os.devnull, 'w')\ntorch.set_printoptions(threshold=10_000)"), "print"),
    "gc.collect": Program(_loop("gc.collect()", "kept = [[i] for i in range(400_000)]"), "Garbage collection"),
    "a loop of Python": Program(_loop("for v in range(200_000): total += v * v", "total = 0"), "Python"),
    "item": Program(_loop("for k in range(640): total += x.view(-1)[k].item()", "total = 0"), "A loop of small calls"),
    "small operators": Program(_loop("for t in range(400): h = torch.tanh(h * 0.5 + x[t % 64, :16])", "h = torch.zeros(16)"), "A loop of small calls"),
    "float64": Program(_DOUBLE, "Computing in float64"),
    "reading": Program(_loop("data = open(path, 'rb').read()", _FILE), "Reading"),
    "contiguous": Program(_loop("z.t().contiguous()", "z = torch.randn(1500, 1500)"), "Copying a tensor (.contiguous())"),
    "clone": Program(_loop("z.clone()", "z = torch.randn(4000, 2000)"), "Copying a tensor (.clone())"),
    "NumPy": Program(_loop("torch.from_numpy(np.sort(z.numpy(), axis=1))", "z = torch.randn(1000, 1000)"), "sort()"),
    "json": Program(_loop("json.dumps(log)", "log = {str(k): [k] * 50 for k in range(1000)}"), "dumps()"),
    "pickle": Program(_loop("pickle.dumps(log)", "log = [{'a': k, 'b': str(k)} for k in range(60_000)]"), "dumps()"),
    "an optimizer's loop": Program(_ADAM, "The optimizer's step"),
    "compiled each step": Program(_RECOMPILED, "Compilation"),
    "a counter that is compiled": Program(_COUNTED, "Compilation"),
    "one_hot": Program(_ONE_HOT, "one_hot()"),
    "deepcopy": Program(_COPIED, "deepcopy()"),
    "losses that are kept": Program(_KEPT, "Memory of the CPU grows"),
    "data that parses": Program(_SLOW_DATA.format(_TOKENS), "Waiting for data"),
    "tolist": Program(_loop("for row in z: total += sum(row.tolist())", "total, z = 0, torch.randn(2000, 16)"), "A loop of small calls"),
    "a tensor of a list": Program(_loop("torch.tensor(rows)", "rows = [[float(k * j % 7) for k in range(256)] for j in range(64)]"), "torch.tensor()"),
    "text of a tensor": Program(_loop("log.info(f'{z}')", "log, z = logging.getLogger('train'), torch.randn(60, 60)\ntorch.set_printoptions(threshold=10_000)"), "Formatting a tensor"),
    "torch.save": Program(_loop("torch.save(z, path)", _FILE.partition("\n")[0] + "\nz = torch.randn(4_000_000)"), "Writing"),
    "sort": Program(_loop("z.sort().values[:10]", "z = torch.randn(300_000)"), "Sorting"),
    "memory filled anew": Program(_loop("z = torch.zeros(4, 1024, 1024)"), "Making a tensor (torch.zeros())"),
    "a product that is summed away": Program(_loop("(z[:, :, None] * z[None]).sum(1)", "z = torch.randn(256, 256)"), "Combining tensors by broadcasting"),
    "anomalies that are looked for": Program(_ANOMALIES, "Looking for anomalies"),
    "lines of a file": Program(_loop("open(path, 'w').writelines(f'{k}\\n' for k in range(100_000))", _FILE.partition("\n")[0]), "Writing"),
    "log": Program(_loop("for k in range(2000): log.info('step %d loss %f', i, k * 0.1)", "log = logging.getLogger('train'); log.setLevel(20); log.addHandler(logging.FileHandler(os.devnull))"), "info()"),
    "a lock": Program(_loop("with lock: pass", _LOCKED), "Entering a with block"),
    "evaluation in each step": Program(_EVALUATED, "Calling the model without a backward"),
    "a mask of items": Program(_MASK, "A loop of small calls"),
    "gradients clipped by item": Program(_CLIPPED, "A loop of small calls"),
    "a checkpoint of everything": Program(_CHECKPOINTED, "Computing forward again in backward"),
    "gradients filled with zeros": Program(_ZEROED, "Filling tensors"),
    "workers that start in each step": Program(_STARTED, "Waiting for data"),
    "products from the left": Program(_loop("a @ a @ b", "a, b = torch.randn(700, 700), torch.randn(700, 1)"), "Multiplying matrices in a costly order"),
    "an inverse": Program(_loop("torch.inverse(a) @ b", "a, b = torch.randn(500, 500) + 500 * torch.eye(500), torch.randn(500, 1)"), "Inverting a matrix"),
    "singular vectors": Program(_loop("torch.linalg.svd(a).S[0]", "a = torch.randn(200, 200)"), "Decomposing a matrix"),
    "unique": Program(_loop("torch.unique(ids)", "ids = torch.randint(0, 1000, (300_000,))"), "Finding the elements that differ"),
    "a selection by a mask": Program(_loop("z[z > 0]", "z = torch.randn(2000, 1000)"), "Selecting by a mask"),
    "elements that are written": Program(_loop("for k in range(2000): z[k // 50, k % 50] = k / 7", "z = torch.zeros(40, 50)"), "A loop of small calls"),
    "a column less a row": Program(_COLUMN, "Combining tensors by broadcasting"),
    "ones that are scattered": Program(_SCATTERED, "Making a one-hot tensor"),
    "attention by hand": Program(_BY_HAND, "Attention by single operators"),
    "a graph that breaks": Program(_BROKEN, "Leaving compiled code"),
    "healthy: a GRU": Program(_GRU, "Nothing stands out"),
    "healthy: a loader with a worker": Program(_WORKER, "Nothing stands out"),
    "healthy: an LSTM": Program(_LSTM, "Nothing stands out"),
    "healthy: data as fast as needed": Program(_LOADED, "Nothing stands out"),
    "healthy: convolutions": Program(_CONVOLUTIONS, "Nothing stands out"),
    "healthy: a transformer": Program(_TRANSFORMER, "Nothing stands out"),
    "healthy: wide": Program(_WIDE, "Nothing stands out"),
    **{name: Program(*row) for name, row in (CAUSES | SCRIPTS).items()},
}  # fmt: skip


def verdict_on(text: str, folder: Path) -> list[str]:
    """What `profile` says of a program, or why it says nothing."""
    (folder / "planted.py").write_text(text)
    words = [sys.executable, "-m", "tilewright", "profile", "--json", "--stop", "--", sys.executable, "planted.py"]
    ended = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    if ended.returncode:
        return [ended.stderr.strip()[-200:]]
    # The program's own output comes before.
    return list(map(str, json.loads(ended.stdout[ended.stdout.index('{\n "verdict"') :])["verdict"]))


def main() -> None:
    chosen = sys.argv[1:] or list(PROGRAMS)
    right = 0
    for name in chosen:
        end, said = PROGRAMS[name]
        text = _START + end
        planted = [number for number, line in enumerate(text.splitlines(), 1) if line.endswith(_PLANTED)]
        with tempfile.TemporaryDirectory() as folder:
            said_first, *others = verdict_on(text, Path(folder))
        # What grows has its line in the second sentence.
        places = " ".join([said_first, *others[:1]])
        ok = said_first.startswith(said) and all(re.search(rf"planted\.py:{line}\b", places) for line in planted)
        right += ok
        print(f"{'right' if ok else 'WRONG':6} {name:24} {said_first}", flush=True)
    print(f"{right} of {len(chosen)}")
    sys.exit(right < len(chosen))


if __name__ == "__main__":
    main()
