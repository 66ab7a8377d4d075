"""What recording adds to a step, against PyTorch's profiler with the same activities and details.

    python -m benchmarks.recording_cost [NAME…] [--rounds 9] [--steps 40]

Rounds of bare steps, steps under `torch.profiler`, and steps under the recorder, in turn, in one process on one core.
Processor time of the thread that makes the steps, so that other programs of the machine do not count: the median step
of each round, and the median of the rounds. `ratio` is what the recorder adds by what the profiler adds.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from torch import nn

from tilewright.measure.recording.plan import RecordingPlan
from tilewright.measure.recording.recorder import Recorder

Step = Callable[[], object]


def _training(model: nn.Module, x: torch.Tensor, kind: type[torch.optim.Optimizer]) -> Step:
    optimizer = kind(model.parameters(), lr=1e-3)  # type: ignore[call-arg]

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def small() -> Step:
    return _training(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), torch.randn(4, 16), torch.optim.SGD)


def block() -> Step:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    return _training(layer, torch.randn(2, 8, 32), torch.optim.AdamW)


def layers() -> Step:
    parts = [part for _ in range(10) for part in (nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU())]
    return _training(nn.Sequential(*parts), torch.randn(4, 16), torch.optim.Adam)


def loop() -> Step:
    """Small operators in a loop of the user's, a line each."""
    x = torch.randn(64, 16)

    def step() -> torch.Tensor:
        state = torch.zeros(16)
        for row in x:
            gate = torch.sigmoid(row)
            state = state * gate
            state = state + row
        return state

    return step


def functions() -> Step:
    """Functions of the user's that call each other, with lines without an operator."""
    x = torch.randn(16)

    def scale(index: int) -> float:
        low = index % 3
        high = low + 1
        return 1.0 / high

    def step() -> torch.Tensor:
        total = x
        for index in range(40):
            factor = scale(index)
            total = total * factor
        return total

    return step


STEPS = {made.__name__: made for made in (small, block, layers, loop, functions)}


def timed(step: Step, steps: int, after: Callable[[], object] = lambda: None) -> float:
    """The median microseconds of processor time; `after` each step."""
    took = []
    for _ in range(steps):
        began = time.thread_time_ns()
        step()
        took.append((time.thread_time_ns() - began) / 1e3)
        after()
    return median(took)


def under_torch(step: Step, steps: int) -> float:
    from torch.profiler import ProfilerActivity, profile

    with profile(
        activities=[ProfilerActivity.CPU], record_shapes=True, with_stack=True, profile_memory=True, acc_events=False
    ):
        return timed(step, steps)


def under_recorder(step: Step, steps: int, folder: Path) -> float:
    recorder = Recorder(RecordingPlan(whole=True, active=0), folder)
    recorder.start()
    try:
        return timed(step, steps, recorder.step)
    finally:
        recorder.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(STEPS))
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for name in given.names:
            step = STEPS[name]()
            timed(step, given.steps)
            rows = [
                (
                    timed(step, given.steps),
                    under_torch(step, given.steps),
                    under_recorder(step, given.steps, Path(folder)),
                )
                for _ in range(given.rounds)
            ]
            bare, torchs, ours = (median(row) for row in zip(*rows, strict=True))
            ratio = (ours - bare) / (torchs - bare)
            print(
                f"{name:10} bare {bare:7.0f}  torch {torchs:7.0f}  ours {ours:7.0f} us  ratio {ratio:.2f}", flush=True
            )


if __name__ == "__main__":
    main()
