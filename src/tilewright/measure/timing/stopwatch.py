"""Stopwatches: one call timed at a time, on the host's clock or by CUDA events."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from tilewright.measure.timing import timers
from tilewright.records.errors import UsageError

LONGEST_LEAD_US = 3000.0
"""How long a device is kept waiting, at most, for a host that is still queuing the call."""
_CYCLES_PER_US = 2000
"""At the highest clock of any card so far, so that a wait is never shorter than asked for."""


class Lap(NamedTuple):
    """One timed call, in microseconds."""

    us: float
    host_us: float | None = None
    """The host's share, where a device runs behind it."""
    late_us: float = 0.0
    """How long the device was still busy after the timed region had ended: work on another stream."""


class Stopwatch(Protocol):
    """Times one call at a time. Tests put a fake clock here."""

    def lead(self, us: float) -> None:
        """Let the device wait so long: everything queued from here on finds a host that is ahead of it."""

    def time(self, function: Callable[[], object], look: Callable[[object], None] | None = None) -> Lap:
        """Run `function` once; what it returns is released before this returns, outside the time.

        `look` gets what `function` returned at the moment the timed region has ended.
        """

    def now(self) -> float:
        """Seconds on a clock that never goes back."""


class CpuStopwatch:
    """`perf_counter` around the call."""

    def lead(self, us: float) -> None:
        pass

    def time(self, function: Callable[[], object], look: Callable[[object], None] | None = None) -> Lap:
        start = timers.now_ns()
        result = function()
        stop = timers.now_ns()
        if look:
            look(result)
        del result
        return Lap((stop - start) / 1e3)

    def now(self) -> float:
        return timers.now()


class CudaStopwatch:
    """CUDA events around the call, after a write that pushes everything else out of L2.

    That write also keeps the device busy while the host queues the call (and `lead` does for a slower
    host), so a launch shows in the figure only as far as the host is slower. The write leaves L2 full of
    lines that are still to be written back, as every kernel of a long sequence finds it.
    `flush_l2=False` times cached data.
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
        """Queue the write that takes over L2."""
        self._flush.zero_()

    def time(self, function: Callable[[], object], look: Callable[[object], None] | None = None) -> Lap:
        import torch

        with torch.cuda.device(self._device):
            self.flush()
            self._timers.record(self._start)
            began = timers.now_ns()
            result = function()
            returned = timers.now_ns()
            self._timers.record(self._stop)
            late_us = self._look(look, result)
        del result
        us = float(self._timers.elapsed_ms(self._start, self._stop)) * 1e3
        return Lap(us, (returned - began) / 1e3, late_us)

    def _look(self, look: Callable[[object], None] | None, result: object) -> float:
        """Hand over the result, or see how long other streams keep the device busy after this one."""
        if look:
            # Queued at once, on the caller's stream: a result that another stream still writes is not ready.
            look(result)
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
