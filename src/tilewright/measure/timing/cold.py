"""Checks that the flush before a timed call empties L2, and reads how much of L2 is reserved for persisting lines."""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tilewright.measure.timing.stopwatch import CudaStopwatch
from tilewright.records.errors import VerificationError

if TYPE_CHECKING:
    import torch

_LINE_BYTES = 128
_PROBE_BYTES = 8 * 2**20
_STEPS = 1024
_LEAST_RATIO = 1.4
"""A load that misses L2 takes two to three times as long as one that hits."""
_PERSISTING_L2 = 6
"""CU_LIMIT_PERSISTING_L2_CACHE_SIZE of the CUDA driver API."""


@dataclass(frozen=True)
class ChaseLatency:
    """Latency of one load in a chain of dependent loads, in nanoseconds."""

    warm_ns: float
    """Right after the same chase, with the lines in L2."""
    cold_ns: float
    """After the flush that precedes every timed call."""


@functools.cache
def check_l2_flush(device: str) -> ChaseLatency:
    """Chase pointers with and without the flush; VerificationError if the flush leaves the lines in L2.

    The chain visits 1024 lines of 8 MiB in random order, so prefetching does not help and the time per step is
    the latency of the cache level that holds the lines.
    """
    warm, cold = CudaStopwatch(device, flush_l2=False), CudaStopwatch(device)
    chain = _chain(device)
    step = functools.partial(_chase, chain)
    for _ in range(3):
        warm.time(step)
    warm_us = min(warm.time(step).us for _ in range(5))
    cold_us = min(cold.time(step).us for _ in range(5))
    chase = ChaseLatency(warm_us * 1e3 / _STEPS, cold_us * 1e3 / _STEPS)
    if chase.cold_ns < _LEAST_RATIO * chase.warm_ns:
        raise VerificationError(
            f"the flush does not empty the L2 of {device}: a load takes {chase.cold_ns:.0f} ns after it and "
            f"{chase.warm_ns:.0f} ns from L2, so timed calls would read cached data"
        )
    return chase


def _chain(device: str) -> torch.Tensor:
    """int32; the first element of each 128-byte line holds the index of the next line's first element: one cycle."""
    import torch

    words = _LINE_BYTES // 4
    order = torch.randperm(_PROBE_BYTES // _LINE_BYTES) * words
    chain = torch.zeros(_PROBE_BYTES // 4, dtype=torch.int32)
    chain[order] = order.roll(-1).to(torch.int32)
    return chain.to(device)


def _chase(chain: torch.Tensor) -> None:
    from tilewright.measure.timing.pointer_chase import chase

    chase(chain, _STEPS)


def persisting_bytes() -> int:
    """Bytes of L2 reserved for persisting lines, which a flush does not evict, in the current CUDA context.

    The driver's figure; 0 without a CUDA driver.
    """
    driver = _driver()
    if driver is None:
        return 0
    size = ctypes.c_size_t()
    failed = driver.cuCtxGetLimit(ctypes.byref(size), _PERSISTING_L2)
    return 0 if failed else size.value


def set_persisting_bytes(nbytes: int) -> None:
    """Reserve `nbytes` of L2 for persisting lines, and reset the lines that persist now."""
    driver = _driver()
    if driver is not None:
        driver.cuCtxSetLimit(_PERSISTING_L2, ctypes.c_size_t(nbytes))
        driver.cuCtxResetPersistingL2Cache()


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
