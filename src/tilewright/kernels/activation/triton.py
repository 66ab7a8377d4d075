"""Activations in Triton: rows of any stride, one program a block of 16-byte vectors, one pass.

Whole blocks take a path without masks: at odd lengths a mask would split every vector into elements.

Limit: memory. Share of a copy on an H200, 16384 x 16384: GELU forward 1.00 in bf16 and fp32, backward 1.05 and 1.03
(it reads more than it writes, and reading is faster), SwiGLU forward 1.05; 17 instructions an element.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from tilewright.kernels import row
from tilewright.kernels.activation.formulas import activate, activate_and_slope, rounded
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe

BLOCK = 1024
"""Elements a program moves of each tensor: one vector of 16 bytes for each of 128 threads in 16 bits."""
WARPS = 4


@triton.jit
def _place(columns: tl.int64, BLOCK: tl.constexpr, FLAT: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """This program's row and its first column."""
    program = tl.program_id(0)
    if FLAT:
        return tl.full([], 0, tl.int64), program.to(tl.int64) * BLOCK
    else:
        blocks = tl.cdiv(columns, BLOCK).to(tl.int32)
        return (program // blocks).to(tl.int64), (program % blocks).to(tl.int64) * BLOCK


@triton.jit
def _read(source: tl.tensor, lane: tl.tensor, left: tl.tensor, WHOLE: tl.constexpr) -> tl.tensor:
    if WHOLE:
        return tl.load(source + lane).to(tl.float32)
    else:
        return tl.load(source + lane, mask=lane < left).to(tl.float32)


@triton.jit
def _write(target: tl.tensor, value: tl.tensor, lane: tl.tensor, left: tl.tensor, WHOLE: tl.constexpr) -> None:
    if WHOLE:
        tl.store(target + lane, rounded(value, target.dtype.element_ty))
    else:
        tl.store(target + lane, rounded(value, target.dtype.element_ty), mask=lane < left)


@triton.jit
def _forward(
    x: tl.tensor, up: tl.tensor | None, y: tl.tensor, left: tl.tensor,
    KIND: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    lane = tl.arange(0, BLOCK)
    value = activate(_read(x, lane, left, WHOLE), KIND, PRECISE)
    if up is not None:
        value = value * _read(up, lane, left, WHOLE)
    _write(y, value, lane, left, WHOLE)


@triton.jit
def forward(
    x: tl.tensor, up: tl.tensor | None, y: tl.tensor, columns: tl.int64, x_row: tl.int64, up_row: tl.int64,
    KIND: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr,
) -> None:  # fmt: skip
    """y[r, c] = act(x[r, c]), times up[r, c] where it is given; `x_row` elements from row to row, y contiguous."""
    row, start = _place(columns, BLOCK, FLAT)
    x += row * x_row + start
    if up is not None:
        up += row * up_row + start
    y += row * columns + start
    left = columns - start
    if left >= BLOCK:
        _forward(x, up, y, left, KIND, PRECISE, BLOCK, True)
    else:
        _forward(x, up, y, left, KIND, PRECISE, BLOCK, False)


@triton.jit
def _backward(
    dy: tl.tensor, x: tl.tensor, up: tl.tensor | None, dx: tl.tensor, dup: tl.tensor | None, left: tl.tensor,
    KIND: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    lane = tl.arange(0, BLOCK)
    value, slope = activate_and_slope(_read(x, lane, left, WHOLE), KIND, PRECISE)
    incoming = _read(dy, lane, left, WHOLE)
    if up is None:
        _write(dx, incoming * slope, lane, left, WHOLE)
    else:
        _write(dx, incoming * _read(up, lane, left, WHOLE) * slope, lane, left, WHOLE)
        _write(dup, incoming * value, lane, left, WHOLE)


@triton.jit
def backward(
    dy: tl.tensor, x: tl.tensor, up: tl.tensor | None, dx: tl.tensor, dup: tl.tensor | None, columns: tl.int64,
    dy_row: tl.int64, x_row: tl.int64, up_row: tl.int64,
    KIND: tl.constexpr, PRECISE: tl.constexpr, BLOCK: tl.constexpr, FLAT: tl.constexpr,
) -> None:  # fmt: skip
    """dx = dy · act'(x); where `up` is given, dx = dy · up · act'(x) and dup = dy · act(x); both contiguous."""
    row, start = _place(columns, BLOCK, FLAT)
    dy += row * dy_row + start
    x += row * x_row + start
    dx += row * columns + start
    if up is not None:
        up += row * up_row + start
        dup += row * columns + start
    left = columns - start
    if left >= BLOCK:
        _backward(dy, x, up, dx, dup, left, KIND, PRECISE, BLOCK, True)
    else:
        _backward(dy, x, up, dx, dup, left, KIND, PRECISE, BLOCK, False)


@dataclass(frozen=True)
class Rows:
    """`count` rows of `columns` neighbours, one stride for each tensor."""

    tensors: tuple[Operand, ...]
    count: int
    columns: int
    strides: tuple[int, ...]
    """Elements from one row of each tensor to its next."""


def rows_of(call: RecipeBuilder, *tensors: Operand) -> Rows:
    """Contiguous tensors of one shape as one long row; else rows along the last dimension, of any stride.

    A tensor whose rows have no one stride, or whose last dimension is not of neighbours, is copied.
    """
    first = tensors[0]
    if all(tensor.is_contiguous() for tensor in tensors):
        return Rows(tensors, 1, first.numel(), (first.numel(),) * len(tensors))
    matrices = tuple(row.rows_of(call, tensor) for tensor in tensors)
    count, columns = matrices[0].shape
    return Rows(matrices, count, columns, tuple(matrix.stride(0) for matrix in matrices))


def forward_recipe(call: RecipeBuilder, x: Operand, up: Operand | None, kind: str) -> Recipe:
    """y, by `forward`."""
    return _recipe(call, forward, (x,), up, 1, kind)


def backward_recipe(call: RecipeBuilder, dy: Operand, x: Operand, up: Operand | None, kind: str) -> Recipe:
    """dx and, where `up` is given, dup, by `backward`."""
    return _recipe(call, backward, (dy, x), up, 1 if up is None else 2, kind)


def _recipe(
    call: RecipeBuilder, kernel: Any, tensors: tuple[Operand, ...], up: Operand | None, results: int, kind: str
) -> Recipe:
    first = tensors[0]
    made = tuple(call.empty(first.shape, first.dtype) for _ in range(results))
    if first.numel():
        rows = rows_of(call, *tensors, *(() if up is None else (up,)))
        absent, no_result = (None,) if up is None else (), (None,) * (len(tensors) - results)
        block = min(BLOCK, triton.next_power_of_2(rows.columns))
        call.launch(
            kernel, (rows.count * triton.cdiv(rows.columns, block),),
            *rows.tensors, *absent, *made, *no_result, rows.columns, *rows.strides, *(0 for _ in absent),
            KIND=kind, PRECISE=first.dtype == torch.float32, BLOCK=block, FLAT=rows.count == 1, num_warps=WARPS,
        )  # fmt: skip
    return call.finish(*made)
