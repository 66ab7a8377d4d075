"""The weighted sum of rows in tiles of 16 × 64: a first Triton kernel in two dimensions, and what its tiles cost.

    tilewright bench weighted_sum
    tilewright kernel weighted_sum 1000x512 --impl tilewright-16x64 --on h200

A program owns ROWS rows and walks along them in tiles of COLUMNS columns, adding products into a tile of sums that
stays in registers; the sum across the tile comes once, at the end. x[1000, 512] gives 63 programs with 8 tiles each,
on 132 multiprocessors of which 69 have nothing to do: tilewright's own tiles are 1.5 times as fast there, and 1.4
times at 16384 x 16384, where a row of a tile is only 128 bytes.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import rounded
from tilewright.kernels.device import current

ROWS, COLUMNS, WARPS = 16, 64, 4


@triton.jit
def forward(x, w, y, rows, columns, x_row, ROWS: tl.constexpr, COLUMNS: tl.constexpr) -> None:
    """y[r] = Σ_c x[r, c]·w[c]; `x_row` elements from row to row of x."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS)
        weight = tl.load(w + column, mask=column < columns, other=0.0).to(tl.float32)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        tile = tl.load(x + row.to(tl.int64)[:, None] * x_row + column[None, :], mask=inside, other=0.0)
        total += tile.to(tl.float32) * weight[None, :]
    tl.store(y + row, rounded(tl.sum(total, 1), y.dtype.element_ty), mask=row < rows)


def weighted_sum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Σ_d x[n, d]·w[d] for x[N, D] with neighbouring columns, on a GPU or in Triton's interpreter. No gradient."""
    rows, columns = x.shape
    y = x.new_empty(rows)
    if rows:
        with current(x):
            forward[(triton.cdiv(rows, ROWS),)](
                x, w, y, rows, columns, x.stride(0), ROWS=ROWS, COLUMNS=COLUMNS, num_warps=WARPS
            )
    return y
