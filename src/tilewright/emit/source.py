"""The source code of a nest's kernel, in the language of its device."""

from __future__ import annotations

from tilewright.emit.cpp import emit_cpp
from tilewright.emit.triton import emit_triton
from tilewright.loops.lower import Lowered


def source_of(lowered: Lowered) -> str:
    emit = emit_triton if lowered.language == "triton" else emit_cpp
    return emit(lowered.nest)
