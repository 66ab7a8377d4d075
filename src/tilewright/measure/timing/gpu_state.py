"""The SM clock of a GPU and its throttle reasons, read through NVML if the driver and `pynvml` are present.

Also how much of L2 is reserved for persisting lines, which the write before a timed call does not evict.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

_DROP = 0.97
"""A clock below this share of its earlier value is reported."""
_REASONS = {
    0x0000000000000004: "the power cap",
    0x0000000000000008: "a hardware slowdown",
    0x0000000000000020: "heat (software)",
    0x0000000000000040: "heat (hardware)",
    0x0000000000000080: "the power brake",
}
"""Bits of NVML's throttle reasons that reduce performance."""


@dataclass(frozen=True)
class SmClock:
    """One reading: the SM clock in MHz, and the reasons that limit it."""

    mhz: int
    reasons: frozenset[str]


def read_sm_clock(device: str) -> SmClock | None:
    """The clock of `cuda` or `cuda:N` now; None for a CPU and without NVML."""
    if device == "cpu" or importlib.util.find_spec("pynvml") is None:
        return None
    import torch

    nvml: ModuleType = importlib.import_module("pynvml")
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        mhz = int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM))
        bits = int(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle))
    except nvml.NVMLError:
        return None
    return SmClock(mhz, frozenset(name for bit, name in _REASONS.items() if bits & bit))


def throttled(before: SmClock | None, after: SmClock | None) -> str | None:
    """A note if the clock dropped between two readings or is limited now, else None.

    >>> throttled(SmClock(1980, frozenset()), SmClock(1980, frozenset()))
    >>> throttled(SmClock(1980, frozenset()), SmClock(1755, frozenset({"the power cap"})))
    'the clock fell from 1980 to 1755 MHz (the power cap)'
    """
    if before is None or after is None:
        return None
    why = f" ({', '.join(sorted(after.reasons))})" if after.reasons else ""
    if after.mhz < _DROP * before.mhz:
        return f"the clock fell from {before.mhz} to {after.mhz} MHz{why}"
    return f"the clock is held at {after.mhz} MHz{why}" if after.reasons else None


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
