"""Launches of the weighted sum: the tiles, decided from sizes alone, and the grids."""

from __future__ import annotations

import functools
import math

import torch
import triton

from tilewright.kernels.device import current
from tilewright.kernels.launches import launch
from tilewright.kernels.weighted_sum import triton as kernels

LONG = 8192
"""Columns from which tiles are 2048 wide; 1024 below."""
MANY = 2**16
"""Rows from which tiles of short rows are 2048 elements; 1024 below, which gives more programs."""
WARP_ELEMENTS = 512
"""Elements of a tile for each warp: two vectors of 16 bytes for each thread in 16 bits."""
PITCH = 16
"""The row stride is a multiple of this many elements, if possible: wide vectors need a known multiple."""
BACKWARD_COLUMNS = 2048
BACKWARD_ROWS = 4
STRIPS = 64
"""Programs that share a block of columns in the backward; each has its own partial sum of dw."""
PARTS = 64
PART_COLUMNS = 32


def forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """y[n] = Σ_d x[n, d]·w[d] for x[N, D] with neighbouring columns."""
    rows, columns = x.shape
    y = torch.empty(rows, dtype=x.dtype, device=x.device)
    pitch = math.gcd(x.stride(0), PITCH)
    tile_rows, tile_columns, warps = forward_tile(rows, columns)
    if rows:
        with current(x):
            launch(
                kernels.forward, (triton.cdiv(rows, tile_rows),),
                x, w, y, rows, columns, x.stride(0) // pitch, PITCH=pitch, ROWS=tile_rows, COLUMNS=tile_columns,
                WHOLE=columns % tile_columns == 0, num_warps=warps,
            )  # fmt: skip
    return y


@functools.cache
def forward_tile(rows: int, columns: int) -> tuple[int, int, int]:
    """Rows, columns and warps of the forward's tile; rows and columns are powers of two."""
    widest = 2048 if columns >= LONG else 1024
    elements = 2048 if columns >= LONG or (columns < 1024 and rows >= MANY) else 1024
    wide = min(triton.next_power_of_2(max(columns, 1)), widest)
    high = min(triton.next_power_of_2(max(rows, 1)), elements // wide)
    return high, wide, max(high * wide // WARP_ELEMENTS, 1)


@functools.cache
def backward_tile(rows: int, columns: int) -> tuple[int, int, int]:
    """Rows and columns of the backward's tile, powers of two, and the strips that each sum a part of dw."""
    wide = min(triton.next_power_of_2(columns), BACKWARD_COLUMNS)
    high = min(triton.next_power_of_2(rows), BACKWARD_ROWS * BACKWARD_COLUMNS // wide)
    return high, wide, min(triton.cdiv(rows, high), STRIPS)


def backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, want_dx: bool, want_dw: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx[N, D], dw[D]); one that is not wanted is empty. dw is the same at every run."""
    rows, columns = x.shape
    dx = torch.empty((rows, columns) if want_dx else (0, 0), dtype=x.dtype, device=x.device)
    dw = torch.empty(columns if want_dw else 0, dtype=w.dtype, device=x.device)
    if columns == 0:
        return dx, dw
    if rows == 0:
        return dx, dw.zero_()
    high, wide, strips = backward_tile(rows, columns)
    pitch = math.gcd(x.stride(0), columns, PITCH)
    parts = torch.empty((strips, columns) if want_dw else (0, 0), dtype=torch.float32, device=x.device)
    with current(x):
        launch(
            kernels.backward, (triton.cdiv(columns, wide), strips),
            dy, x, w, dx, parts, rows, columns, x.stride(0) // pitch, PITCH=pitch, ROWS=high, COLUMNS=wide,
            WANT_DX=want_dx, WANT_DW=want_dw, num_warps=4,
        )  # fmt: skip
        if want_dw:
            launch(
                kernels.sum_parts, (triton.cdiv(columns, PART_COLUMNS),),
                parts, dw, strips, columns, PARTS=PARTS, COLUMNS=PART_COLUMNS, num_warps=4,
            )  # fmt: skip
    return dx, dw
