"""Compiles a copy of bf16 by blocks of 1024 for each architecture named, into a folder. Run as a script."""

from __future__ import annotations

import sys
from pathlib import Path

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource


@triton.jit
def copy(x, y, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y + i, tl.load(x + i, mask=i < n) * 2, mask=i < n)


if __name__ == "__main__":
    folder, *architectures = sys.argv[1:]
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(3)}
    source = ASTSource(copy, {"x": "*bf16", "y": "*bf16", "n": "i32", "BLOCK": "constexpr"}, {(3,): 1024}, aligned)
    for architecture in architectures:
        code = triton.compile(source, target=GPUTarget("cuda", int(architecture), 32))
        (Path(folder) / f"{architecture}.cubin").write_bytes(code.asm["cubin"])
