"""Softmax and log-softmax over rows in Triton.

Rows of up to `BLOCK` elements lie in the registers of one program, several short ones at a time, and move
through HBM once. Longer rows are read twice, block by block, with maximum and sum carried along (Milakov and
Gimelshein, "Online normalizer calculation for softmax", 2018); on Hopper the CUDA C++ kernels beside this
file take those, since a cluster holds them.
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import rounded
from tilewright.launch.builder import Operand, RecipeBuilder

BLOCK = 16384
"""Elements of the longest row that one program holds: 64 registers for each of the threads of 8 warps."""
TILE = 4096
"""Elements that a program takes at once from several short rows."""
STEP = 4096
"""Elements that a program takes at once from a row it does not hold."""
LOWEST = tl.constexpr(-3.402823466e38)
"""Finite, so that -inf minus it is no NaN."""


@triton.jit
def forward_rows(
    x, y, rows, columns, x_stride, y_stride, LOG: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (row < rows) & (col < columns)
    a = tl.load(x + row * x_stride + col, inside, other=float("-inf")).to(tl.float32)
    # max drops NaN; the sum of exponentials brings it back.
    a -= tl.maximum(tl.max(a, 1), LOWEST)[:, None]
    e = tl.exp(a)
    total = tl.sum(e, 1)[:, None]
    result = a - tl.log(total) if LOG else e / total
    tl.store(y + row * y_stride + col, rounded(result, y.dtype.element_ty), inside)


@triton.jit
def forward_blocks(x, y, columns, x_stride, y_stride, LOG: tl.constexpr, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    x += row * x_stride
    y += row * y_stride
    most = tl.full((), LOWEST, tl.float32)
    total = tl.full((), 0.0, tl.float32)
    start = 0
    while start < columns:
        col = start + tl.arange(0, STEP)
        a = tl.load(x + col, col < columns, other=float("-inf")).to(tl.float32)
        above = tl.maximum(most, tl.max(a, 0))
        total = total * tl.exp(most - above) + tl.sum(tl.exp(a - above), 0)
        most = above
        start += STEP
    start = 0
    while start < columns:
        col = start + tl.arange(0, STEP)
        a = tl.load(x + col, col < columns, other=float("-inf")).to(tl.float32) - most
        result = a - tl.log(total) if LOG else tl.exp(a) / total
        tl.store(y + col, rounded(result, y.dtype.element_ty), col < columns)
        start += STEP


@triton.jit
def _gradient(result, gradient, total, LOG: tl.constexpr):
    return gradient - tl.exp(result) * total if LOG else result * (gradient - total)


@triton.jit
def backward_rows(
    y,
    dy,
    dx,
    rows,
    columns,
    y_stride,
    dy_stride,
    dx_stride,
    LOG: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    col = tl.arange(0, BLOCK_COLS)[None, :]
    inside = (row < rows) & (col < columns)
    result = tl.load(y + row * y_stride + col, inside, other=0.0).to(tl.float32)
    gradient = tl.load(dy + row * dy_stride + col, inside, other=0.0).to(tl.float32)
    total = tl.sum(gradient if LOG else result * gradient, 1)[:, None]
    tl.store(dx + row * dx_stride + col, rounded(_gradient(result, gradient, total, LOG), dx.dtype.element_ty), inside)


@triton.jit
def backward_blocks(y, dy, dx, columns, y_stride, dy_stride, dx_stride, LOG: tl.constexpr, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    y += row * y_stride
    dy += row * dy_stride
    dx += row * dx_stride
    total = tl.full((), 0.0, tl.float32)
    start = 0
    while start < columns:
        col = start + tl.arange(0, STEP)
        gradient = tl.load(dy + col, col < columns, other=0.0).to(tl.float32)
        if LOG:
            total += tl.sum(gradient, 0)
        else:
            total += tl.sum(tl.load(y + col, col < columns, other=0.0).to(tl.float32) * gradient, 0)
        start += STEP
    start = 0
    while start < columns:
        col = start + tl.arange(0, STEP)
        result = tl.load(y + col, col < columns, other=0.0).to(tl.float32)
        gradient = tl.load(dy + col, col < columns, other=0.0).to(tl.float32)
        tl.store(dx + col, rounded(_gradient(result, gradient, total, LOG), dx.dtype.element_ty), col < columns)
        start += STEP


def blocks(columns: int) -> dict[str, int]:
    """The block sizes and warps for whole rows of `columns` elements, as launch arguments."""
    block_cols = triton.next_power_of_2(columns)
    block_rows = max(TILE // block_cols, 1)
    return {"BLOCK_ROWS": block_rows, "BLOCK_COLS": block_cols, "num_warps": min(max(block_cols // 1024, 4), 16)}


def forward(call: RecipeBuilder, x: Operand, y: Operand, log: bool) -> None:
    """Softmax (or its logarithm) of the rows of `x` into those of `y`: [N, M] each, any row stride."""
    rows, columns = x.shape
    if columns <= BLOCK:
        sizes: dict[str, Any] = blocks(columns)
        grid = (triton.cdiv(rows, sizes["BLOCK_ROWS"]),)
        call.launch(forward_rows, grid, x, y, rows, columns, x.stride(0), y.stride(0), LOG=log, **sizes)
    else:
        call.launch(forward_blocks, (rows,), x, y, columns, x.stride(0), y.stride(0), LOG=log, STEP=STEP, num_warps=8)


def backward(call: RecipeBuilder, y: Operand, dy: Operand, dx: Operand, log: bool) -> None:
    """The gradient of the rows whose result is `y` into `dx`, from that of the result, `dy`: [N, M] each."""
    rows, columns = y.shape
    strides = y.stride(0), dy.stride(0), dx.stride(0)
    if columns <= BLOCK:
        sizes: dict[str, Any] = blocks(columns)
        grid = (triton.cdiv(rows, sizes["BLOCK_ROWS"]),)
        call.launch(backward_rows, grid, y, dy, dx, rows, columns, *strides, LOG=log, **sizes)
    else:
        call.launch(backward_blocks, (rows,), y, dy, dx, columns, *strides, LOG=log, STEP=STEP, num_warps=8)
