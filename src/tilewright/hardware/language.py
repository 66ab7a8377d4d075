"""Which language the kernels of a device are written in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    import torch

Language = Literal["c++", "triton"]


def language_of(device: torch.device) -> Language:
    """Triton on a GPU, C++ on a CPU; `TILEWRIGHT_TARGET=triton` forces Triton, for its interpreter."""
    return "triton" if device.type == "cuda" or os.environ.get("TILEWRIGHT_TARGET") == "triton" else "c++"
