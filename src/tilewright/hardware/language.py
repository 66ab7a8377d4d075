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


def language_of(device: torch.device) -> Language:
    """Triton on a GPU, C++ on a CPU; `TILEWRIGHT_TARGET=triton` forces Triton, for its interpreter."""
    on_gpu = "cuda" in (device.type, _planned.get())
    return "triton" if on_gpu or os.environ.get("TILEWRIGHT_TARGET") == "triton" else "c++"


@contextmanager
def planned_for(device: DeviceType) -> Iterator[None]:
    """A program captured on a CPU is planned as `device` would run it: without a GPU, for one."""
    token = _planned.set(device)
    try:
        yield
    finally:
        _planned.reset(token)
