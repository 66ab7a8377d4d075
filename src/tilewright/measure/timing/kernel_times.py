"""What a call runs on the GPU: the profiler's kernels and copies, with their times and counts."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

_CALLS = 3


class KernelTime(NamedTuple):
    """A kernel or copy in one call: total microseconds, how often it ran, and its name."""

    us: float
    launches: float
    name: str


@dataclass(frozen=True)
class KernelTimes:
    """The kernels and copies of one call, the longest total first."""

    kernels: tuple[KernelTime, ...]

    @property
    def us(self) -> float:
        """Sum of their times; kernels that overlap count in full."""
        return sum(kernel.us for kernel in self.kernels)

    @property
    def launches(self) -> int:
        return round(sum(kernel.launches for kernel in self.kernels))


def kernel_times(function: Callable[[], object]) -> KernelTimes:
    """The kernels of `function`, which has run before: means over three calls; none where CUPTI records none."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    import torch
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        for _ in range(_CALLS):
            function()
            torch.cuda.synchronize()
    session = profiler.profiler
    assert session is not None and session.kineto_results is not None, "a profile that ended has results"
    return totals(
        (
            (event.name(), event.duration_ns() / 1e3)
            for event in session.kineto_results.events()
            if event.device_type().name == "CUDA"
        ),
        _CALLS,
    )


def totals(records: Iterable[tuple[str, float]], calls: int) -> KernelTimes:
    """(name, µs) of each kernel in `calls` calls, summed by name for one of them.

    >>> totals([("gemm", 8.0), ("add", 1.0), ("add", 3.0), ("gemm", 10.0)], 2).kernels
    (KernelTime(us=9.0, launches=1.0, name='gemm'), KernelTime(us=2.0, launches=1.0, name='add'))
    """
    found: dict[str, list[float]] = {}
    for name, us in records:
        found.setdefault(name, []).append(us)
    kernels = [KernelTime(sum(times) / calls, len(times) / calls, name) for name, times in found.items()]
    return KernelTimes(tuple(sorted(kernels, reverse=True)))
