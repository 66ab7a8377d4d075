"""How much of L2 is reserved for persisting lines, which the write before a timed call does not evict."""

from __future__ import annotations

import ctypes
import functools

_PERSISTING_L2 = 6
"""CU_LIMIT_PERSISTING_L2_CACHE_SIZE of the CUDA driver API."""


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
