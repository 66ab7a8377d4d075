"""The work of a GPU on all its streams, as PyTorch's profiler records it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

CYCLES_PER_US = 2000
_SPIN = "spin_kernel"


class Record(NamedTuple):
    """The profiler's record of one kernel or copy on the device, in nanoseconds."""

    name: str
    start: int
    end: int


def device_records(run: Callable[[], object], times: int) -> list[Record]:
    """The kernels, copies and fills of so many calls of `run`, which waits for them; none where CUPTI records none."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(times):
            run()
    session = profiler.profiler
    assert session is not None and session.kineto_results is not None, "a profile that ended has results"
    return [
        Record(event.name(), event.start_ns(), event.start_ns() + event.duration_ns())
        for event in session.kineto_results.events()
        if event.device_type().name == "CUDA"
    ]


def is_mark(record: Record) -> bool:
    """Whether it is a spin kernel, which delimits calls."""
    return _SPIN in record.name


def busy_us(records: Sequence[Record]) -> float:
    """Microseconds during which at least one of the kernels ran."""
    return union([(record.start, record.end) for record in records]) / 1e3


def union(intervals: Sequence[tuple[int, int]]) -> int:
    """The length of the union of intervals."""
    covered, reached = 0, None
    for start, end in sorted(intervals):
        begin = start if reached is None else max(start, reached)
        covered += max(0, end - begin)
        reached = end if reached is None else max(reached, end)
    return covered
