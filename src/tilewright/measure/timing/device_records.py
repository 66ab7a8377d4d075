"""The work of a GPU on all its streams, as PyTorch's profiler records it, and the time of each of several calls.

Of several calls each finds in L2 what the one before it left there, as in a program. Gaps between kernels do not count.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tilewright.measure.timing import timers

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


MARK_US = 3.0
"""A spin kernel between two calls, by which the records are divided."""


class CallTime(NamedTuple):
    """Median microseconds of one call, and the names of the kernels, copies and fills that it ran, in their order."""

    us: float
    kernels: tuple[str, ...] = ()


def kernel_times(calls: Sequence[Callable[[], object]], repeats: int = 7) -> list[CallTime | None]:
    """The time of the kernels, copies and fills of each of `calls`; None for one that launches nothing.

    The calls run in order, `repeats` times after a warm-up.
    """
    cuda = timers.cuda_timers()

    def run() -> None:
        cuda.spin(int(MARK_US * CYCLES_PER_US))
        for call in calls:
            call()
            cuda.spin(int(MARK_US * CYCLES_PER_US))
        cuda.synchronize()

    run()
    laps: list[list[float]] = [[] for _ in calls]
    names: list[tuple[str, ...]] = [() for _ in calls]
    for number, inside in enumerate(divided(device_records(run, repeats))):
        place = number % (len(calls) + 1)
        if place < len(calls) and inside:
            laps[place].append(busy_us(inside))
            names[place] = tuple(record.name for record in inside)
    return [CallTime(statistics.median(us), ran) if us else None for us, ran in zip(laps, names, strict=True)]


def divided(records: Sequence[Record]) -> list[list[Record]]:
    """The records behind each spin kernel, up to the next one."""
    parts: list[list[Record]] = []
    for record in sorted(records, key=lambda record: record.start):
        if is_mark(record):
            parts.append([])
        elif parts:
            parts[-1].append(record)
    return parts
