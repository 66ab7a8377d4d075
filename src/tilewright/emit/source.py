"""The source code of a region's kernel, in the language of its device."""

from __future__ import annotations

from tilewright.emit.cpp import emit_cpp
from tilewright.emit.triton import emit_triton
from tilewright.hardware.language import Language, language_of
from tilewright.passes.fusion import Region

__all__ = ["Language", "language_of", "source_of"]


def source_of(region: Region) -> str:
    emit = emit_triton if language_of(region.device) == "triton" else emit_cpp
    return emit(region.lowered.nest)
