"""Adds the partial column sums that the programs of a kernel have written, in a fixed order."""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import rounded
from tilewright.launch.builder import Operand, RecipeBuilder

MOST_PARTS, TILE = 128, 2048
"""The most parts that a program adds at once, and the elements of its tile."""


@triton.jit
def column_sums(
    parts: tl.tensor, first: tl.tensor, second: tl.tensor, count: tl.tensor, columns: tl.tensor,
    PARTS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """parts [1 or 2, count, columns] in fp32, added over `count`: those of [0] to `first`, of [1] to `second`."""
    kind, column = tl.program_id(1), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    within = column < columns
    total = tl.zeros([PARTS, COLUMNS], tl.float32)
    start = 0
    while start < count:
        part = start + tl.arange(0, PARTS)
        at = parts + (kind * count + part).to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(at, mask=(part < count)[:, None] & within[None, :], other=0.0)
        start += PARTS
    sums = rounded(tl.sum(total, 0), first.dtype.element_ty)
    tl.store(first + column, sums, mask=within & (kind == 0))
    tl.store(second + column, sums, mask=within & (kind == 1))


def add_parts(call: RecipeBuilder, parts: Operand, *results: Operand) -> None:
    """Launch the sum of parts [results, programs, elements] into one or two results of one dtype."""
    columns = results[0].numel()
    count = parts.numel() // (len(results) * columns)
    tile = min(MOST_PARTS, triton.next_power_of_2(count))
    grid = triton.cdiv(columns, TILE // tile), len(results)
    ends = results[0], results[-1]
    call.launch(column_sums, grid, parts, *ends, count, columns, PARTS=tile, COLUMNS=TILE // tile, num_warps=4)
