"""Layer norm and RMS norm in Triton: rows of up to `LONGEST` columns in one program's registers.

Takes any matrix whose columns are adjacent, at any row pitch and alignment. Limit: DRAM for short rows; alignment that
Triton does not know (5000 columns); registers that spill beyond 16384 columns forward, 8192 backward. H200, of a copy's
bandwidth: forward 0.96 to 0.98 at 256 to 4096 columns, 0.24 to 0.79 at 5000; backward of bf16 layer norm 0.66 to 0.83
up to 8192.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.hardware.architectures import limits_of
from tilewright.kernels.column_sums import add_parts
from tilewright.launch.builder import Operand, RecipeBuilder

TILE = 4096
"""Elements a program takes of short rows."""
PROGRAMS = 4
"""Persistent programs a multiprocessor, backward."""


@triton.jit
def _load(base, offsets, inside):  # type: ignore[no-untyped-def]
    return tl.load(base + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _scaled(normal, weight, bias, column, within, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr):  # type: ignore[no-untyped-def]
    if HAS_WEIGHT:
        normal = normal * _load(weight, column, within)[None, :]
    if HAS_BIAS:
        normal = normal + _load(bias, column, within)[None, :]
    return normal


@triton.jit
def forward_rows(  # type: ignore[no-untyped-def]
    x, x_pitch, residual, residual_pitch, y, total, weight, bias, means, rstds, rows, columns, eps,
    CENTERED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK_ROWS whole rows a program."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK)
    live, within = row < rows, column < columns
    inside = live[:, None] & within[None, :]
    values = _load(x, row[:, None] * x_pitch + column[None, :], inside)
    out = row[:, None] * columns + column[None, :]
    if RESIDUAL:
        values += _load(residual, row[:, None] * residual_pitch + column[None, :], inside)
        rounded = values.to(total.dtype.element_ty)
        tl.store(total + out, rounded, mask=inside)
        values = rounded.to(tl.float32)
    if CENTERED:
        mean = tl.sum(values / columns, 1)
        # Add the mean's rounding error: the mean of a row of one value is that value then.
        mean += tl.sum(tl.where(within[None, :], values - mean[:, None], 0.0) / columns, 1)
        tl.store(means + row, mean, mask=live)
        values = tl.where(within[None, :], values - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt_rn(tl.sum(values * values, 1) / columns + eps)
    tl.store(rstds + row, rstd, mask=live)
    normal = _scaled(values * rstd[:, None], weight, bias, column, within, HAS_WEIGHT, HAS_BIAS)
    tl.store(y + out, normal.to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_rows(  # type: ignore[no-untyped-def]
    x, x_pitch, dy, dy_pitch, dsum, dsum_pitch, dx, weight, means, rstds, partial, rows, columns,
    CENTERED: tl.constexpr, HAS_WEIGHT: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Persistent: each program keeps its sums for dweight and dbias in registers over its rows."""
    program, programs = tl.program_id(0), tl.num_programs(0)
    column = tl.arange(0, BLOCK)
    within = column < columns
    scale = _load(weight, column, within) if HAS_WEIGHT else tl.full([BLOCK], 1.0, tl.float32)
    d_weight = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    d_bias = tl.zeros([BLOCK_ROWS, BLOCK], tl.float32)
    tile = program
    while tile < tl.cdiv(rows, BLOCK_ROWS):
        row = tile.to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
        live = row < rows
        inside = live[:, None] & within[None, :]
        normal = _load(x, row[:, None] * x_pitch + column[None, :], inside)
        incoming = _load(dy, row[:, None] * dy_pitch + column[None, :], inside)
        rstd = tl.load(rstds + row, mask=live, other=0.0)
        if CENTERED:
            normal = tl.where(inside, normal - tl.load(means + row, mask=live, other=0.0)[:, None], 0.0)
        normal *= rstd[:, None]
        # Selected, so that no multiply-add rounds it otherwise than the sum: a row of one value has no gradient.
        gradient = tl.where(inside, incoming * scale[None, :], 0.0)
        if HAS_WEIGHT:
            d_weight += incoming * normal
        if HAS_BIAS:
            d_bias += incoming
        off = gradient - normal * (tl.sum(gradient * normal, 1) / columns)[:, None]
        if CENTERED:
            off -= (tl.sum(gradient, 1) / columns)[:, None]
        result = off * rstd[:, None]
        if RESIDUAL:
            result += _load(dsum, row[:, None] * dsum_pitch + column[None, :], inside)
        tl.store(dx + row[:, None] * columns + column[None, :], result.to(dx.dtype.element_ty), mask=inside)
        tile += programs
    to = partial + program.to(tl.int64) * columns + column
    if HAS_WEIGHT:
        tl.store(to, tl.sum(d_weight, 0), mask=within)
        to += programs.to(tl.int64) * columns
    if HAS_BIAS:
        tl.store(to, tl.sum(d_bias, 0), mask=within)


class Tile(NamedTuple):
    """The tile that a program holds at once."""

    rows: int
    columns: int
    warps: int


def tile_of(columns: int, direction: str) -> Tile:
    """For rows of so many columns: 16 bytes a load at every size."""
    block = triton.next_power_of_2(columns)
    rows = max(1, TILE // block)
    return Tile(rows, block, min(32, max(4, rows * block // (2048 if direction == "forward" else 512))))


def forward(
    call: RecipeBuilder, x: Operand, residual: Operand | None, weight: Operand | None, bias: Operand | None, y: Operand,
    total: Operand | None, mean: Operand, rstd: Operand, eps: float, centered: bool,
) -> None:  # fmt: skip
    """The launch that fills y, total, mean and rstd; as `cuda.forward`."""
    rows, columns = x.shape
    tile = tile_of(columns, "forward")
    call.launch(
        forward_rows, (triton.cdiv(rows, tile.rows),),
        x, x.stride(0), residual, 0 if residual is None else residual.stride(0), y, total, weight, bias, mean, rstd,
        rows, columns, eps, centered, weight is not None, bias is not None, residual is not None, tile.rows,
        tile.columns, num_warps=tile.warps,
    )  # fmt: skip


def backward(
    call: RecipeBuilder, dy: Operand, x: Operand, dsum: Operand | None, weight: Operand | None, mean: Operand,
    rstd: Operand, dx: Operand, d_weight: Operand, d_bias: Operand, centered: bool,
) -> None:  # fmt: skip
    """The launches that fill the gradients; as `cuda.backward`."""
    rows, columns = x.shape
    tile = tile_of(columns, "backward")
    # Persistent programs, that share the rows.
    programs = min(triton.cdiv(rows, tile.rows), PROGRAMS * limits_of(x.device).multiprocessors)
    gradients = [each for each in (d_weight, d_bias) if each.numel()]
    partial = call.empty((len(gradients), programs, columns), torch.float32)
    call.launch(
        backward_rows, (programs,), x, x.stride(0), dy, dy.stride(0), dsum, 0 if dsum is None else dsum.stride(0), dx,
        weight, mean, rstd, partial, rows, columns, centered, weight is not None, d_bias.numel() > 0, dsum is not None,
        tile.rows, tile.columns, num_warps=tile.warps,
    )  # fmt: skip
    if gradients:
        add_parts(call, partial, *gradients)
