"""Multiplies the gradients that forward computed by the incoming gradient, in place."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import rounded
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe

BLOCK = 4096


@triton.jit
def _scale(gradient, factor, n, BLOCK: tl.constexpr):
    """gradient *= factor; writes nothing if the factor is one."""
    by = tl.load(factor)
    if by != 1.0:
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(gradient + at, mask=at < n).to(tl.float32)
        tl.store(gradient + at, rounded(x * by, gradient.dtype.element_ty), mask=at < n)


def scale(call: RecipeBuilder, gradient: Operand, factor: Operand) -> Recipe:
    """`gradient *= factor` for a contiguous tensor and a scalar [] in fp32 on the same device."""
    grid = (triton.cdiv(gradient.numel(), BLOCK),)
    call.launch(_scale, grid, gradient, factor, gradient.numel(), BLOCK=BLOCK, num_warps=8)
    return call.finish()
