"""Which language the kernels of a device are written in."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Language = Literal["c++", "triton"]
DeviceType = Literal["cpu", "cuda"]

_planned: ContextVar[DeviceType] = ContextVar("_planned", default="cpu")
_capability: ContextVar[str | None] = ContextVar("_capability", default=None)


def runs_on_gpu(device: torch.device) -> bool:
    """Whether what `device` holds is on a GPU, or is planned as if it were."""
    return "cuda" in (device.type, _planned.get())


def language_of(device: torch.device) -> Language:
    """Triton on a GPU, C++ on a CPU; `TILEWRIGHT_TARGET=triton` forces Triton, for its interpreter."""
    return "triton" if runs_on_gpu(device) or os.environ.get("TILEWRIGHT_TARGET") == "triton" else "c++"


def stands_for_gpu(device: torch.device) -> bool:
    """Whether what `device` holds is planned as if it were on a GPU, which it is not."""
    return runs_on_gpu(device) and device.type != "cuda"


def planned_capability() -> str | None:
    """Compute capability of the GPU that a program is planned for, `9.0`; None where none is, or it is unknown."""
    return _capability.get()


@contextmanager
def planned_for(device: DeviceType, capability: str | None = None) -> Iterator[None]:
    """A program captured on a CPU is planned as `device`, of that compute capability, would run it: without a GPU."""
    tokens = _planned.set(device), _capability.set(capability)
    try:
        yield
    finally:
        _planned.reset(tokens[0])
        _capability.reset(tokens[1])
