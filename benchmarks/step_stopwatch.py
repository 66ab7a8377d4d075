"""A stopwatch of whole steps of a program, host and device together."""

from __future__ import annotations

from collections.abc import Callable

from tilewright.measure.timing import timers
from tilewright.measure.timing.stopwatch import Lap


class StepStopwatch:
    """`perf_counter` around the call and the work that it left on the GPU: the wall time of a step of a program."""

    def lead(self, us: float) -> None:
        pass

    def time(self, function: Callable[[], object], inspect: Callable[[object], None] | None = None) -> Lap:
        synchronize = timers.cuda_timers().synchronize
        synchronize()
        start = timers.now_ns()
        result = function()
        returned = timers.now_ns()
        synchronize()
        stop = timers.now_ns()
        if inspect:
            inspect(result)
        del result
        return Lap((stop - start) / 1e3, (returned - start) / 1e3)

    def now(self) -> float:
        return timers.now()
