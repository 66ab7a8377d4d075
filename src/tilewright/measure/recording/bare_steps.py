"""Times steps that run without a profiler."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

from tilewright.measure.recording.plan import FEW_STEPS
from tilewright.measure.recording.windows import synchronize

_MOST_STEPS = 100_000
_PATIENCE = 10
"""For `FEW_STEPS` slow steps, as a multiple of the seconds asked for."""


def bare_steps(
    into: list[float], enough: Callable[[int, float], bool], compiling: Callable[[], float]
) -> Iterator[None]:
    """Add the microseconds of each step; resume it at the end of a step. It ends where `enough(steps, seconds)`.

    `compiling` gives the seconds spent in compilations so far, which do not count. The device is waited for before the
    first step and in the last one; between them the host may run ahead.
    """
    synchronize()
    began = last = time.perf_counter() - compiling()
    while not enough(len(into), last - began):
        yield
        now = time.perf_counter() - compiling()
        if enough(len(into) + 1, now - began):
            synchronize()
            now = time.perf_counter() - compiling()
        into.append((now - last) * 1e6)
        last = now


def enough_to_compare(seconds: float) -> Callable[[int, float], bool]:
    """After `seconds` and `FEW_STEPS` steps, or ten times as long."""
    return lambda steps, took: steps >= _MOST_STEPS or took >= seconds * (1 if steps >= FEW_STEPS else _PATIENCE)


class Rush:
    """The first steps that are recorded take less than half of a bare one where what they wait for queued up while the
    profiler started, as batches of another thread or process. It lasts until a step that waits."""

    MOST = 10

    def __init__(self, bare_us: list[float]) -> None:
        self._seconds = median(bare_us) / 2e6 if bare_us else 0.0
        self.began = time.perf_counter()
        """The step that goes on."""
        self._ended = self.began
        self.lasts = True
        self._steps = 0

    def is_over(self) -> bool:
        """At the end of a step: whether it is the first that waits, after others that did not."""
        self.began, self._ended = self._ended, time.perf_counter()
        waits = self._ended - self.began >= self._seconds
        over = self.lasts and waits and self._steps > 0
        self.lasts, self._steps = self.lasts and not waits, self._steps + 1
        return over
