"""What `whatif` predicts for changes of several gloo ranks on a CPU, beside the same ranks with the change made.

    torchrun --nproc_per_node 2 -m benchmarks.whatif_ranks [NAME…]

The ranks are recorded together, the step with the change is predicted, and both programs run in turn. Most of the
host's work is a sleep, so that ranks that share a core do not slow each other down.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.whatif import Result
from tilewright.measure.recording.plan import Recording, RecordingPlan
from tilewright.measure.recording.recorder import Recorder
from tilewright.profiling.saved import save
from tilewright.trace.whatif.answer import what_if

Step = Callable[[], object]
_STEPS, _ROUNDS = 8, 4
_PLAN = RecordingPlan(wait=4, warmup=1, active=8, timed=0.0)


@dataclass(frozen=True)
class Ranks:
    """What each rank does in a step: all of them work, some longer, and then they exchange tensors."""

    work_ms: float = 60.0
    late_ms: tuple[float, float] = (0.0, 0.0)
    """What each rank works longer."""
    collectives: int = 1
    elements: int = 1
    computes: bool = False
    """The late work is Python, not a sleep."""
    wrapped: bool = False
    """The gradients of a model of `DistributedDataParallel` are sent too."""

    def step(self) -> Step:
        late, data = self.late_ms[dist.get_rank()], torch.ones(self.elements)
        model: nn.Module = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        model = nn.parallel.DistributedDataParallel(model) if self.wrapped else model
        x = torch.randn(8, 64)

        def work(ms: float) -> None:
            until = time.perf_counter() + ms / 1e3
            if not self.computes:
                time.sleep(ms / 1e3)
            while time.perf_counter() < until:
                sum(range(1000))

        def step() -> None:
            time.sleep(self.work_ms / 1e3)
            if late:
                work(late)
            if self.wrapped:
                model(x).sum().backward()
            for _ in range(self.collectives):
                dist.all_reduce(data)

        return step


_LATE = (0, 40)
CHANGES = {
    "a late rank that sleeps": ("rank:1", Ranks(late_ms=_LATE), Ranks()),
    "a rank that is late by much": ("rank:1", Ranks(late_ms=(0, 120)), Ranks()),
    "a late rank 0": ("rank:0", Ranks(late_ms=(30, 0)), Ranks()),
    "a late rank that runs Python": ("rank:1", Ranks(late_ms=_LATE, computes=True), Ranks()),
    "a late rank of DDP": ("rank:1", Ranks(late_ms=_LATE, wrapped=True), Ranks(wrapped=True)),
    "one large collective": ("class:communication", Ranks(elements=4_000_000), Ranks(collectives=0)),
    "twenty collectives": ("class:communication", Ranks(collectives=20, elements=100_000), Ranks(collectives=0)),
    "a late rank nobody waits for": ("class:communication", Ranks(late_ms=_LATE), Ranks(late_ms=_LATE, collectives=0)),
    "a collective that is hidden": ("overlap", Ranks(elements=4_000_000), Ranks()),
    "some that are hidden": ("overlap", Ranks(late_ms=_LATE, collectives=4, elements=1_000_000), Ranks(late_ms=_LATE)),
}  # fmt: skip


def _recorded(ranks: Ranks, folder: Path) -> Recording:
    recorder = Recorder(_PLAN, folder, name=f"rank{dist.get_rank()}")
    step = ranks.step()
    recorder.start()
    for _ in range(16):
        step()
        recorder.step()
    return recorder.stop()


def _timed(step: Step) -> float:
    took = []
    for _ in range(_STEPS):
        began = time.perf_counter()
        step()
        took.append(time.perf_counter() - began)
    return 1e3 * median(took)


def measured(name: str, folder: Path) -> Result | None:
    """On rank 0 the step of the slowest rank before the change, predicted, and after it."""
    asked, before, after = CHANGES[name]
    recordings: list[Recording | None] = [None] * dist.get_world_size()
    dist.all_gather_object(recordings, _recorded(before, folder))
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for ranks, into in zip((before, after), times, strict=True):
            dist.barrier()
            slowest = torch.tensor(_timed(ranks.step()))
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
            into.append(slowest.item())
    found = None
    if dist.get_rank() == 0:
        saved = save([it for it in recordings if it], name="ranks", command="whatif_ranks", target=name)
        (told,) = what_if(saved.run, [asked]).predictions
        first, second = map(median, times)
        expected = told.predicted_us / 1e3
        found = Result(name, asked, first, expected, second, expected / second - 1)
    dist.barrier()
    return found


def main() -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    dist.init_process_group("gloo")
    shared: list[str | None] = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(shared)
    folder, rows = Path(str(shared[0])), []
    for name in sys.argv[1:] or CHANGES:
        if row := measured(name, folder):
            rows.append(row)
            print(
                f"{name:30} {row.asked:20} {row.before_ms:7.1f} ms  predicted {row.predicted_ms:7.1f}  "
                f"is {row.after_ms:7.1f}  {row.error:+7.1%}",
                flush=True,
            )
    if rows:
        print(f"{sum(abs(row.error) <= 0.05 for row in rows)} of {len(rows)} within 5 %", flush=True)
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    main()
