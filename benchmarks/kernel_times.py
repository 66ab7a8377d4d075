"""Kernels and copies of a call on the GPU, from the profiler, with their times and counts."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from tilewright.measure.timing.device_records import device_records

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
    import torch

    def run() -> None:
        function()
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    records = device_records(run, _CALLS)
    return totals(((record.name, (record.end - record.start) / 1e3) for record in records), _CALLS)


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
