"""What a GPU's clock did while it was timed, read through NVML where the driver and `pynvml` are there."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from types import ModuleType

_DROP = 0.97
"""A clock below this share of what it was before is worth a word."""
_REASONS = {
    0x0000000000000004: "the power cap",
    0x0000000000000008: "a hardware slowdown",
    0x0000000000000020: "heat (software)",
    0x0000000000000040: "heat (hardware)",
    0x0000000000000080: "the power brake",
}
"""Bits of NVML's clocks-event reasons that take performance away."""


@dataclass(frozen=True)
class Clock:
    """One reading: the multiprocessors' clock in MHz, and what holds it down."""

    mhz: int
    reasons: frozenset[str]


def read_clock(device: str) -> Clock | None:
    """The clock of `cuda` or `cuda:N` now; None for a CPU and where NVML cannot be asked."""
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
    return Clock(mhz, frozenset(name for bit, name in _REASONS.items() if bits & bit))


def throttled(before: Clock | None, after: Clock | None) -> str | None:
    """What to say of a clock that was lower after than before, or held down; None where all is well.

    >>> throttled(Clock(1980, frozenset()), Clock(1980, frozenset()))
    >>> throttled(Clock(1980, frozenset()), Clock(1755, frozenset({"the power cap"})))
    'the clock fell from 1980 to 1755 MHz (the power cap)'
    """
    if before is None or after is None:
        return None
    why = f" ({', '.join(sorted(after.reasons))})" if after.reasons else ""
    if after.mhz < _DROP * before.mhz:
        return f"the clock fell from {before.mhz} to {after.mhz} MHz{why}"
    return f"the clock is held at {after.mhz} MHz{why}" if after.reasons else None
