"""References to the clocks, taken before any code under test is imported.

An implementation could replace `time.perf_counter` or `torch.cuda.Event.elapsed_time`. Stopwatches use the
references kept here, and `replaced` finds functions that are not the originals.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

now_ns: Callable[[], int] = time.perf_counter_ns
now: Callable[[], float] = time.perf_counter

_HOST = ("perf_counter", "perf_counter_ns", "monotonic", "time", "sleep")
_HOST_BY_NAME = {f"time.{name}": getattr(time, name) for name in _HOST}
_EVENT = ("record", "elapsed_time", "synchronize", "query")
_CUDA = ("Event", "synchronize", "current_stream", "_sleep")


@dataclass(frozen=True)
class CudaTimers:
    """PyTorch's events and synchronisation, as they were at the first call of `cuda_timers`."""

    event: Callable[..., Any]
    record: Callable[..., None]
    elapsed_ms: Callable[..., float]
    wait: Callable[..., None]
    """For one event."""
    synchronize: Callable[..., None]
    """For all streams of the device."""
    spin: Callable[[int], None]
    """Keep the device busy for a number of cycles."""


@functools.cache
def cuda_timers() -> CudaTimers:
    """The timers; call this before code under test is imported. Also works with a CPU-only PyTorch."""
    import torch

    _originals()
    cuda = torch.cuda
    return CudaTimers(
        cuda.Event, cuda.Event.record, cuda.Event.elapsed_time, cuda.Event.synchronize, cuda.synchronize, cuda._sleep
    )


@functools.cache
def _originals() -> dict[str, Any]:
    import torch

    return {f"torch.cuda.{name}": getattr(torch.cuda, name) for name in _CUDA} | {
        f"torch.cuda.Event.{name}": getattr(torch.cuda.Event, name) for name in _EVENT
    }


def replaced() -> list[str]:
    """Restore the timers that were replaced since this module was imported, and return their names."""
    import torch

    wrong = []
    for name, original in (_HOST_BY_NAME | _originals()).items():
        place, _, attribute = name.rpartition(".")
        owner = {"time": time, "torch.cuda": torch.cuda, "torch.cuda.Event": torch.cuda.Event}[place]
        if getattr(owner, attribute, None) is not original:
            wrong.append(name)
            setattr(owner, attribute, original)
    return wrong
