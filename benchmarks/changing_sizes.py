"""Programs whose sizes change from call to call: time of a call, compilations, against static programs and Inductor.

    python -m benchmarks.changing_sizes [--sizes 100] [--rounds 5] [--device cpu] [MODEL ...]

Each implementation runs through all sizes in turn. The first round has what new sizes cost. In the later ones the
implementations take turns at each size, on one thread: `static` is tilewright with `dynamic=False`, a program for each
size, for a few of the sizes.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tilewright.backend import backend, recording
from tilewright.launch.executor import EXTENSION

STATIC = 6
"""For so many sizes a static program is compiled."""


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        read = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(read.transpose(1, 2).reshape(batch, length, width))


class LanguageModel(nn.Module):
    def __init__(self, width: int = 128, heads: int = 4, layers: int = 2, words: int = 1000) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(1024, width)
        self.attention = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.feed = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(layers)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, words)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for attention, feed in zip(self.attention, self.feed, strict=True):
            x = attention(x)
            x = x + feed(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def _mlp() -> nn.Module:
    layers = [nn.Linear(256, 512), nn.GELU(), nn.LayerNorm(512), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 64)]
    return nn.Sequential(*layers)


def _cnn() -> nn.Module:
    first = [nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)]
    second = [nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*first, *second, nn.Linear(32, 10))


Inputs = Callable[[int], torch.Tensor]
MODELS: dict[str, tuple[Callable[[], nn.Module], Inputs, range]] = {
    "mlp": (_mlp, lambda n: torch.randn(n, 256), range(16, 272)),
    "lm": (LanguageModel, lambda n: torch.randint(1000, (2, n)), range(16, 272)),
    "cnn": (_cnn, lambda n: torch.randn(n, 3, 32, 32), range(2, 66)),
}


def _call(run: Callable[..., torch.Tensor], x: torch.Tensor, *, trains: bool) -> float:
    """Microseconds of a call: processor time of this thread, which others do not disturb; with a GPU, wall time."""
    clock = time.perf_counter if x.is_cuda else time.thread_time
    begin = clock()
    if trains:
        run(x).square().mean().backward()
    else:
        run(x)
    if x.is_cuda:
        torch.cuda.synchronize()
    return (clock() - begin) * 1e6


def measure(name: str, sizes: Sequence[int], rounds: int, device: str, *, trains: bool) -> dict[str, Any]:
    """Microseconds of a call by implementation, and how tilewright's compare with the others'.

    A ratio is of two calls of one size in the same round: the median of its rounds, then the geometric mean of sizes.
    """
    make, inputs, _ = MODELS[name]
    torch.manual_seed(0)
    model = make().train(trains).to(device)
    xs = {n: inputs(n).to(device) for n in sizes}
    shown = sorted(xs)[:: max(len(xs) // STATIC, 1)][:STATIC]
    runs: dict[str, Callable[..., torch.Tensor]] = {
        "eager": model,
        "tilewright": torch.compile(model, backend=backend, dynamic=True),
        "inductor": torch.compile(model, dynamic=True),
    }
    found: dict[str, Any] = {}
    EXTENSION.module()
    EXTENSION.wait()
    with torch.set_grad_enabled(trains), recording() as record:
        for impl, run in runs.items():
            found[f"{impl} first round"] = sum(_call(run, xs[n], trains=trains) for n in sizes) / len(sizes)
        found["programs"] = len(record.graphs)
        static = {n: torch.compile(model, backend=backend, dynamic=False) for n in shown}
        with torch._dynamo.config.patch(recompile_limit=2 * STATIC + 8, accumulated_recompile_limit=1000):
            for n, run in static.items():
                for _ in range(3):
                    _call(run, xs[n], trains=trains)
            times = _interleaved(
                {n: runs | ({"static": static[n]} if n in static else {}) for n in xs}, xs, rounds, trains
            )
    for impl in (*runs, "static"):
        found[impl] = statistics.fmean(statistics.median(by[impl]) for by in times.values() if impl in by)
    for impl in ("static", "inductor", "eager"):
        pairs = [zip(by["tilewright"], by[impl], strict=True) for by in times.values() if impl in by]
        found[f"of {impl}"] = statistics.geometric_mean(statistics.median(a / b for a, b in pair) for pair in pairs)
    return found


def _interleaved(
    runs: dict[int, dict[str, Callable[..., torch.Tensor]]], xs: dict[int, torch.Tensor], rounds: int, trains: bool
) -> dict[int, dict[str, list[float]]]:
    """Microseconds by size and implementation, one for each round. The implementations of a size run one after the
    other in a random order: what ran before leaves caches and the memory of the process in another state."""
    times: dict[int, dict[str, list[float]]] = {n: {impl: [] for impl in impls} for n, impls in runs.items()}
    order = random.Random(0)
    for _ in range(rounds):
        for n, impls in runs.items():
            for impl in order.sample(list(impls), len(impls)):
                times[n][impl].append(_call(impls[impl], xs[n], trains=trains))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--sizes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", default="cpu")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    for name in chosen.models:
        for trains in (False, True):
            torch._dynamo.reset()
            sizes = random.Random(0).choices(MODELS[name][2], k=chosen.sizes)
            found = measure(name, sizes, chosen.rounds, chosen.device, trains=trains)
            print(name, "training" if trains else "inference", flush=True)
            for key, value in found.items():
                print(f"  {key:24} {value:12.2f}", flush=True)


if __name__ == "__main__":
    main()
