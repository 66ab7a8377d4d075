"""Stopwatches time one call, by the host's clock or by CUDA events."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from tilewright.measure.timing import timers
from tilewright.records.errors import UsageError

LONGEST_LEAD_US = 3000.0
"""Longest time that a device waits for the host to queue the call."""
_CYCLES_PER_US = 2000
"""Above the clock of every supported GPU, so that a wait is never shorter than requested."""


class Lap(NamedTuple):
    """One timed call, in microseconds."""

    us: float
    host_us: float | None = None
    """Host time of the call, on a device that runs asynchronously."""
    late_us: float = 0.0
    """How long the device was busy after the timed region had ended: work on another stream."""


class Stopwatch(Protocol):
    """Times one call at a time. Tests pass a fake one."""

    def lead(self, us: float) -> None:
        """Let the device wait for `us`, so that the host runs ahead of it from here on."""

    def time(self, function: Callable[[], object], inspect: Callable[[object], None] | None = None) -> Lap:
        """Run `function` once; its result is released before this returns, outside the timed region.

        `inspect` gets the result right after the timed region.
        """

    def now(self) -> float:
        """Seconds on a monotonic clock."""


class CpuStopwatch:
    """`perf_counter` around the call."""

    def lead(self, us: float) -> None:
        pass

    def time(self, function: Callable[[], object], inspect: Callable[[object], None] | None = None) -> Lap:
        start = timers.now_ns()
        result = function()
        stop = timers.now_ns()
        if inspect:
            inspect(result)
        del result
        return Lap((stop - start) / 1e3)

    def now(self) -> float:
        return timers.now()


class CudaStopwatch:
    """CUDA events around the call, after a write of twice the size of L2, which evicts all other lines.

    That write (and `lead`, for a slower host) also keeps the device busy while the host queues the call, so the
    time includes launch overhead only if the host is slower still. The write leaves L2 full of dirty lines, as
    in a long sequence of kernels. `flush_l2=False` times cached data.
    """

    def __init__(self, device: str = "cuda", *, flush_l2: bool = True) -> None:
        import torch

        self._device = torch.device(device)
        self._timers = timers.cuda_timers()
        l2_bytes = int(torch.cuda.get_device_properties(self._device).L2_cache_size)
        flushed = 2 * l2_bytes if flush_l2 else 0
        self._flush = torch.empty(flushed, dtype=torch.uint8, device=self._device)
        with torch.cuda.device(self._device):
            self._start = self._timers.event(enable_timing=True)
            self._stop = self._timers.event(enable_timing=True)

    def lead(self, us: float) -> None:
        import torch

        with torch.cuda.device(self._device):
            self._timers.spin(int(min(us, LONGEST_LEAD_US) * _CYCLES_PER_US))

    def flush(self) -> None:
        """Queue the write that flushes L2."""
        self._flush.zero_()

    def time(self, function: Callable[[], object], inspect: Callable[[object], None] | None = None) -> Lap:
        import torch

        with torch.cuda.device(self._device):
            self.flush()
            self._timers.record(self._start)
            began = timers.now_ns()
            result = function()
            returned = timers.now_ns()
            self._timers.record(self._stop)
            late_us = self._inspect(inspect, result)
        del result
        us = float(self._timers.elapsed_ms(self._start, self._stop)) * 1e3
        return Lap(us, (returned - began) / 1e3, late_us)

    def _inspect(self, inspect: Callable[[object], None] | None, result: object) -> float:
        """Pass the result to `inspect`; without it, the time that other streams are busy after this one."""
        if inspect:
            # `inspect` reads on the caller's stream at once: a result that another stream still writes is wrong there.
            inspect(result)
            self._timers.synchronize()
            return 0.0
        self._timers.wait(self._stop)
        ended = timers.now_ns()
        self._timers.synchronize()
        return (timers.now_ns() - ended) / 1e3

    def now(self) -> float:
        return timers.now()


def stopwatch_for(device: str) -> Stopwatch:
    """The stopwatch of `cpu`, `cuda` or `cuda:N`; UsageError for any other device."""
    if device == "cpu":
        return CpuStopwatch()
    if device.split(":")[0] == "cuda":
        return CudaStopwatch(device)
    raise UsageError(f"cannot time on device {device!r}; known: cpu, cuda, cuda:N")
