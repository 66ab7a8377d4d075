"""The time of each of several calls on a GPU as the profiler records their kernels, one call after the other.

Each call finds in L2 what the one before it left there, as in a program. Gaps between kernels do not count.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tilewright.measure.timing import timers
from tilewright.measure.timing.device_records import CYCLES_PER_US, Record, busy_us, device_records, is_mark

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
