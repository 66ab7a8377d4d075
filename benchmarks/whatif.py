"""What `whatif` predicts for a change, beside the same program with that change made.

    python -m benchmarks.whatif [--device cpu|cuda] [--out FILE] [NAME…]

Each program is profiled, and its step with the change predicted as a ratio. Then both programs run in turn, and the
median step of the changed one is compared with that ratio of the median step of the other one.
"""

from __future__ import annotations

import argparse
import fcntl
import gc
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, Dataset

import tilewright
from tilewright.trace.whatif.answer import what_if

Step = Callable[[], object]
_ROUNDS = 5


@dataclass(frozen=True)
class Change:
    """A program before and after a change, as functions that make its step, and how `whatif` calls the change."""

    name: str
    asked: str
    before: Callable[[], Step]
    after: Callable[[], Step]


@dataclass(frozen=True)
class Result:
    """Milliseconds of a step; `error` is of the predicted one."""

    name: str
    asked: str
    before_ms: float
    predicted_ms: float
    after_ms: float
    error: float


class Samples(Dataset[Any]):
    """Each takes so many milliseconds of sleep."""

    def __init__(self, width: int, ms: float) -> None:
        self.width, self.ms = width, ms

    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, at: int) -> tuple[torch.Tensor, int]:
        time.sleep(self.ms / 1e3)
        return torch.randn(self.width), at % 10


class Programs:
    """Programs of one device; the sizes are those at which a step takes milliseconds there."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.on_gpu = device == "cuda"
        self.wide, self.batch = (4096, 2048) if self.on_gpu else (512, 256)

    def perceptron(self, width: int, layers: int, dropout: float = 0.0) -> nn.Module:
        parts = [
            part
            for _ in range(layers)
            for part in (nn.Linear(width, width), nn.GELU(), nn.Dropout(dropout))[: 2 + (dropout > 0)]
        ]
        return nn.Sequential(*parts, nn.Linear(width, 10)).to(self.device)

    def trained(
        self, model: nn.Module, x: torch.Tensor, around: Step | None = None, **options: Any
    ) -> Callable[[], torch.Tensor]:
        """A training step of `model` with AdamW; `around` is called once in it."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, **({"fused": True} | options))
        y = torch.randint(0, 10, (len(x),), device=self.device)

        def step() -> torch.Tensor:
            loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if around is not None:
                around()
            return loss

        return step

    def usual(self, around: Step | None = None, batch: int = 0, dropout: float = 0.0) -> Step:
        x = torch.randn(batch or self.batch, self.wide, device=self.device)
        return self.trained(self.perceptron(self.wide, 3, dropout), x, around)

    def small(self, around: Step | None = None, **options: Any) -> Callable[[], torch.Tensor]:
        """Many small layers, that the host cannot launch as fast as the device runs them."""
        return self.trained(self.perceptron(128, 24), torch.randn(32, 128, device=self.device), around, **options)

    def read(self) -> Step:
        """The loss is read in each step, as where it is logged."""
        step = self.small()
        return lambda: step().item()

    def loaded(self, workers: int | None) -> Step:
        """Batches of samples that take 0.25 ms each; None: one batch for all steps."""
        width = self.wide // 2
        model = self.perceptron(width, 2)
        x = torch.randn(32, width, device=self.device)
        step, batches = self.trained(model, x), self._batches(width, workers)

        def take() -> object:
            x.copy_(next(batches)[0])
            return step()

        return step if workers is None else take

    def _batches(self, width: int, workers: int | None) -> Iterator[Any]:
        if workers is None:
            return iter(())
        return iter(DataLoader(Samples(width, 0.25), batch_size=32, num_workers=workers))

    def replayed(self) -> Step:
        """The small model in inference as a CUDA graph."""
        model, x = self.perceptron(128, 24).eval(), torch.randn(32, 128, device=self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad():
            model(x)
            with torch.cuda.graph(graph):
                model(x)
        return graph.replay

    def inferred(self) -> Step:
        model, x = self.perceptron(128, 24).eval(), torch.randn(32, 128, device=self.device)

        def step() -> object:
            with torch.no_grad():
                return model(x)

        return step

    def normed(self, norms: int) -> Step:
        """Products with so many layer norms after each."""
        layers = [
            part
            for _ in range(4)
            for part in (nn.Linear(self.wide, self.wide), *(nn.LayerNorm(self.wide) for _ in range(norms)))
        ]
        model, x = nn.Sequential(*layers).to(self.device), torch.randn(self.batch, self.wide, device=self.device)

        def step() -> object:
            with torch.no_grad():
                return model(x)

        return step

    def copied(self, copies: bool) -> Step:
        """A batch that comes from the host's memory in each step."""
        model, x = self.perceptron(self.wide, 2), torch.randn(self.batch, self.wide, device=self.device)
        host, step = torch.randn(self.batch, self.wide), self.trained(model, x)

        def copying() -> object:
            x.copy_(host)
            return step()

        return copying if copies else step

    def convolved(self, last: bool) -> Step:
        model = nn.Sequential(*(nn.Conv2d(64, 64, 3, padding=1) for _ in range(6))).to(self.device)
        x = torch.randn(64 if self.on_gpu else 2, 64, 56, 56, device=self.device)
        if last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            x = x.to(memory_format=torch.channels_last)

        def step() -> object:
            with torch.no_grad():
                return model(x)

        return step

    def changes(self) -> Iterator[Change]:
        kept = [[at] for at in range(50_000)]
        text = {str(at): [at] * 40 for at in range(500)}
        yield Change("no sleep", "class:sleep and locks", lambda: self.usual(lambda: time.sleep(0.004)), self.usual)
        yield Change(
            "no collection", "class:garbage collection", lambda: self.small(lambda: (gc.collect(), kept)), self.small
        )
        yield Change("no JSON", "gone:dumps", lambda: self.usual(lambda: json.dumps(text)), self.usual)
        yield Change("no printing", "class:I/O", lambda: self.usual(self._printing()), self.usual)
        yield Change("no loading", "class:data", lambda: self.loaded(0), lambda: self.loaded(None))
        yield Change("two workers", "workers:2", lambda: self.loaded(0), lambda: self.loaded(2))
        yield Change("twice the batch", "batch:2", self.usual, lambda: self.usual(batch=2 * self.batch))
        yield Change("four times the batch", "batch:4", self.usual, lambda: self.usual(batch=4 * self.batch))
        yield Change("a fused optimizer", "optimizer", lambda: self.small(fused=False, foreach=False), self.small)
        yield (
            Change("no dropout", "gone:aten::*dropout*", lambda: self.usual(dropout=0.1), self.usual)
            if self.on_gpu
            else Change(
                "no dropout",
                "gone:aten::dropout,MulBackward0,DivBackward0",
                lambda: self.usual(dropout=0.1),
                self.usual,
            )
        )
        yield Change("no second norm", "gone:aten::native_layer_norm", lambda: self.normed(1), lambda: self.normed(0))
        if not self.on_gpu:
            return
        yield Change("no reading of the loss", "class:device", self.read, self.small)
        yield Change("a CUDA graph", "graph", self.inferred, self.replayed)
        yield Change("no copy", "gone:*Memcpy HtoD*", lambda: self.copied(True), lambda: self.copied(False))
        yield Change(
            "channels last",
            "gone:*nchwToNhwc*,*nhwcToNchw*",
            lambda: self.convolved(False),
            lambda: self.convolved(True),
        )
        yield Change("half the batch", "batch:0.5", lambda: self.usual(batch=2 * self.batch), self.usual)

    def _printing(self) -> Step:
        out, shown = Path(tempfile.gettempdir(), "whatif.txt").open("w"), torch.randn(40, 40)  # noqa: SIM115
        return lambda: print(shown, file=out)


def measured(change: Change, device: str, seconds: float, alone: AbstractContextManager[object]) -> Result:
    """Profile the program before the change, predict, and time both in turn; `alone` is held while steps run."""
    step = change.before()
    recorded = tilewright.profile(change.name.replace(" ", "-"), wait=8, warmup=2, active=4)
    with recorded as profile, alone:
        for _ in range(16):
            step()
            profile.step()
    (predicted,) = what_if(profile.path, [change.asked]).predictions
    del step
    before, after = change.before(), change.after()
    times: tuple[list[float], list[float]] = ([], [])
    with alone:
        for turn in range(_ROUNDS + 1):
            for step, into in zip((before, after), times, strict=True):
                took = _timed(step, device, seconds / _ROUNDS / 2)
                if turn:
                    into.append(took)
    first, second = (median(into) for into in times)
    expected = first * predicted.predicted_us / predicted.measured_us
    return Result(change.name, change.asked, first, expected, second, expected / second - 1)


class Alone:
    """Holds a file that several of these processes share, so that one of them uses the device at a time."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def __enter__(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)


def _timed(step: Step, device: str, seconds: float) -> float:
    """Milliseconds of a step; on a CPU the median one, which other programs delay least."""
    step()
    took: list[float] = []
    begun = _now(device)
    while not took or time.perf_counter() - begun < seconds:
        at = time.perf_counter()
        step()
        took.append(time.perf_counter() - at)
    whole = _now(device) - begun
    return 1e3 * (whole / len(took) if device == "cuda" else median(took))


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--part", type=int, nargs=2, default=[0, 1], metavar=("I", "N"), help="every N-th from I on")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    if given.device == "cpu":
        torch.set_num_threads(1)
    rows = []
    alone = Alone(Path(tempfile.gettempdir(), "tilewright-whatif.lock"))
    chosen = [it for it in Programs(given.device).changes() if not given.names or it.name in given.names]
    for change in chosen[given.part[0] :: given.part[1]]:
        try:
            found = measured(change, given.device, given.seconds, alone)
        except Exception as error:  # The others are measured all the same.
            print(f"{change.name:24} {type(error).__name__}: {error}", flush=True)
            continue
        rows.append(found)
        if given.out:
            given.out.write_text("".join(json.dumps(asdict(row)) + "\n" for row in rows))
        print(
            f"{found.name:24} {found.asked:32} {found.before_ms:8.3f} ms  predicted {found.predicted_ms:8.3f}  "
            f"is {found.after_ms:8.3f}  {found.error:+7.1%}",
            flush=True,
        )
    print(f"{sum(abs(row.error) <= 0.05 for row in rows)} of {len(rows)} within 5 %")


if __name__ == "__main__":
    main()
