"""The source code of a region's kernel, in the language of its device."""

from __future__ import annotations

from tilewright.emit.cpp import emit_cpp
from tilewright.emit.triton import emit_triton
from tilewright.passes.fusion import Region


def source_of(region: Region) -> str:
    emit = emit_triton if region.language == "triton" else emit_cpp
    return emit(region.lowered.nest)
