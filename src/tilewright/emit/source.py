"""Which language a region's kernel is written in, and its source."""

from __future__ import annotations

import os
from typing import Literal

import torch

from tilewright.emit.cpp import emit_cpp
from tilewright.emit.triton import emit_triton
from tilewright.passes.fusion import Region

Language = Literal["c++", "triton"]


def language_of(device: torch.device) -> Language:
    """Triton on a GPU, C++ on a CPU; `TILEWRIGHT_TARGET=triton` forces Triton, for its interpreter."""
    return "triton" if device.type == "cuda" or os.environ.get("TILEWRIGHT_TARGET") == "triton" else "c++"


def source_of(region: Region) -> str:
    """The source of the region's kernel, in the language of its device."""
    emit = emit_triton if language_of(region.device) == "triton" else emit_cpp
    return emit(region.lowered.nest)
