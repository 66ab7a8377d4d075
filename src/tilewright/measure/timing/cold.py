"""Is L2 cold when a stopwatch says so? Proved by walking memory, once a process; and who keeps lines in it."""

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
"""A load that misses L2 takes two to three times one that hits; halfway to one there is no telling."""
_PERSISTING_L2 = 6
"""CU_LIMIT_PERSISTING_L2_CACHE_SIZE of the CUDA driver API."""


@dataclass(frozen=True)
class Walk:
    """Nanoseconds of one load that waits for the one before it."""

    warm_ns: float
    """Right after the same walk: lines that L2 holds."""
    cold_ns: float
    """After the flush that precedes every timed call."""


@functools.cache
def proved_cold(device: str) -> Walk:
    """Walk a chain of pointers with and without the flush; VerificationError if the flush leaves it in L2.

    The chain visits 1024 lines of 8 MiB in random order, so no prefetch helps and each step waits for one
    load: its time is that of the level that answers.
    """
    warm, cold = CudaStopwatch(device, flush_l2=False), CudaStopwatch(device)
    chain = _chain(device)
    step = functools.partial(_walk, chain)
    for _ in range(3):
        warm.time(step)
    warm_us = min(warm.time(step).us for _ in range(5))
    cold_us = min(cold.time(step).us for _ in range(5))
    walk = Walk(warm_us * 1e3 / _STEPS, cold_us * 1e3 / _STEPS)
    if walk.cold_ns < _LEAST_RATIO * walk.warm_ns:
        raise VerificationError(
            f"the flush does not empty the L2 of {device}: a load takes {walk.cold_ns:.0f} ns after it and "
            f"{walk.warm_ns:.0f} ns from L2, so no figure here would be one of memory"
        )
    return walk


def _chain(device: str) -> torch.Tensor:
    """int32, where element 32·i of line i holds the index of the next line's first element: one cycle."""
    import torch

    words = _LINE_BYTES // 4
    order = torch.randperm(_PROBE_BYTES // _LINE_BYTES) * words
    chain = torch.zeros(_PROBE_BYTES // 4, dtype=torch.int32)
    chain[order] = order.roll(-1).to(torch.int32)
    return chain.to(device)


def _walk(chain: torch.Tensor) -> None:
    from tilewright.measure.timing.walk import walk

    walk(chain, _STEPS)


def persisting_bytes() -> int:
    """How much of L2 is set aside for lines that a flush does not evict, in the current CUDA context.

    The driver's own figure; 0 where no CUDA driver is.
    """
    driver = _driver()
    if driver is None:
        return 0
    size = ctypes.c_size_t()
    failed = driver.cuCtxGetLimit(ctypes.byref(size), _PERSISTING_L2)
    return 0 if failed else size.value


def set_persisting_bytes(nbytes: int) -> None:
    """Set aside so much of L2 from now on, and let go of the lines held there."""
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
