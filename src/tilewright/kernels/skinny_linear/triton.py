"""x · Wᵀ for few rows of x, in Triton: up to three weights in one launch, with what follows.

One row: a program takes BLOCK_N rows of a weight, multiplies them element by element and sums at the end, so that all
of its loads are in flight together. More rows (up to 64): tensor cores, the weight's rows as the left operand; where N
is small, SPLITS programs share the columns of a block, leave fp32 sums in scratch, and the last one adds them in order.

Limit: the bandwidth of the weights.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import INTERPRETED, rounded
from tilewright.emit.triton_math import erf_absolute, sigmoid_approximate


@triton.jit
def _one_row(
    x: tl.tensor, gain: tl.tensor, weight: tl.tensor, n: tl.tensor, rows: tl.tensor, columns: tl.constexpr,
    stride: tl.tensor, NORM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """Products [BLOCK_N, 1] of the row x, times `gain` where NORM, with rows n of the weight; x's sum of squares."""
    acc = tl.zeros([BLOCK_N, BLOCK_K], tl.float32)
    squares = tl.zeros([BLOCK_K], tl.float32)
    for first in range(0, columns, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        there = (n[:, None] < rows) & (k[None, :] < columns)
        tile = tl.load(weight + n[:, None].to(tl.int64) * stride + k[None, :], mask=there, other=0.0)
        row = tl.load(x + k, mask=k < columns, other=0.0).to(tl.float32)
        if NORM:
            squares += row * row
            row *= tl.load(gain + k, mask=k < columns, other=0.0).to(tl.float32)
        acc += tile.to(tl.float32) * row[None, :]
    return tl.sum(acc, 1)[:, None], tl.sum(squares, 0)


@triton.jit
def _several_rows(
    x: tl.tensor, weight: tl.tensor, n: tl.tensor, rows: tl.tensor, m: tl.tensor, count: tl.tensor,
    columns: tl.constexpr, x_stride: tl.tensor, stride: tl.tensor, begin: tl.tensor, end: tl.tensor,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Products [BLOCK_N, ROWS] over columns begin to end."""
    acc = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for first in tl.range(begin, end, BLOCK_K):
        k = first + tl.arange(0, BLOCK_K)
        there = (n[:, None] < rows) & (k[None, :] < columns)
        tile = tl.load(weight + n[:, None].to(tl.int64) * stride + k[None, :], mask=there, other=0.0)
        right = tl.load(
            x + m[None, :] * x_stride + k[:, None], mask=(m[None, :] < count) & (k[:, None] < columns), other=0.0
        )
        # The interpreter multiplies the bits of bf16 as if they were integers.
        if INTERPRETED:
            acc += tl.dot(tile.to(tl.float32), right.to(tl.float32), input_precision="ieee")
        else:
            acc = tl.dot(tile, right, acc)
    return acc


@triton.jit
def _summed(
    scratch: tl.tensor, block: tl.tensor, BLOCK_N: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """The sum of a block over its splits, all of which are in scratch."""
    at = tl.arange(0, BLOCK_N)[:, None] * ROWS + tl.arange(0, ROWS)[None, :]
    total = tl.zeros([BLOCK_N, ROWS], tl.float32)
    for part in tl.static_range(SPLITS):
        # Through L2: L1 does not see the stores of other multiprocessors.
        total += tl.load(scratch + (block * SPLITS + part) * BLOCK_N * ROWS + at, cache_modifier=".cg")
    return total


@triton.jit
def _activated(x: tl.tensor, KIND: tl.constexpr) -> tl.tensor:
    """The activation KIND of x, for results of 16 bits; those of `operators/activations.py`."""
    if KIND == "gelu":
        return x * 0.5 * (erf_absolute(x * 0.7071067811865476) + 1.0)
    elif KIND == "gelu_tanh":
        # ½(1 + tanh u) is the sigmoid of 2u.
        return x * sigmoid_approximate(1.5957691216057308 * (x + 0.044715 * x * x * x))
    elif KIND == "silu":
        return x * sigmoid_approximate(x)
    else:
        return x


@triton.jit
def _finish(
    acc: tl.tensor, other: tl.tensor, bias: tl.tensor, up_bias: tl.tensor, residual: tl.tensor, y: tl.tensor,
    n: tl.tensor, rows: tl.tensor, m: tl.tensor, count: tl.tensor, residual_stride: tl.tensor, BIAS: tl.constexpr,
    UP_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr,
) -> None:  # fmt: skip
    """Stores the activation KIND of acc + bias, "swiglu" being silu(acc + bias) · (other + up_bias); and residual."""
    if BIAS:
        acc += tl.load(bias + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
    if KIND == "swiglu":
        if UP_BIAS:
            other += tl.load(up_bias + n, mask=n < rows, other=0.0).to(tl.float32)[:, None]
        acc = _activated(acc, "silu") * other
    else:
        acc = _activated(acc, KIND)
    inside = (n[:, None] < rows) & (m[None, :] < count)
    if RESIDUAL:
        acc += tl.load(residual + m[None, :] * residual_stride + n[:, None], mask=inside, other=0.0).to(tl.float32)
    tl.store(y + m[None, :] * rows + n[:, None], rounded(acc, y.dtype.element_ty), mask=inside)


@triton.jit
def _block(
    x: tl.tensor, gain: tl.tensor, weight: tl.tensor, up: tl.tensor, bias: tl.tensor, up_bias: tl.tensor,
    residual: tl.tensor, y: tl.tensor, scratch: tl.tensor, zeros: tl.tensor, block: tl.tensor, local: tl.tensor,
    split: tl.tensor, count: tl.tensor, rows: tl.tensor, columns: tl.constexpr, x_stride: tl.tensor, stride: tl.tensor,
    up_stride: tl.tensor, residual_stride: tl.tensor, eps: tl.tensor, blocks: tl.tensor, NORM: tl.constexpr,
    BIAS: tl.constexpr, UP_BIAS: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Block `local` of one weight, which is block `block` of all."""
    GATED: tl.constexpr = KIND == "swiglu"
    n = local * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, ROWS)
    if ROWS == 1:
        acc, squares = _one_row(x, gain, weight, n, rows, columns, stride, NORM, BLOCK_N, BLOCK_K)
        other = acc
        if GATED:
            other, _ = _one_row(x, gain, up, n, rows, columns, up_stride, NORM, BLOCK_N, BLOCK_K)
        if NORM:
            scale = tl.rsqrt(squares / columns + eps)
            acc *= scale
            other *= scale
        _finish(
            acc, other, bias, up_bias, residual, y, n, rows, m, count, residual_stride, BIAS, UP_BIAS, RESIDUAL,
            KIND,
        )  # fmt: skip
    else:
        length: tl.constexpr = (columns + SPLITS * BLOCK_K - 1) // (SPLITS * BLOCK_K) * BLOCK_K
        begin = split * length
        end = tl.minimum(begin + length, columns)
        acc = _several_rows(
            x, weight, n, rows, m, count, columns, x_stride, stride, begin, end, BLOCK_N, BLOCK_K, ROWS
        )  # fmt: skip
        other = acc
        if GATED:
            other = _several_rows(
                x, up, n, rows, m, count, columns, x_stride, up_stride, begin, end, BLOCK_N, BLOCK_K, ROWS
            )  # fmt: skip
        if SPLITS == 1:
            _finish(
                acc, other, bias, up_bias, residual, y, n, rows, m, count, residual_stride, BIAS, UP_BIAS, RESIDUAL,
                KIND,
            )  # fmt: skip
        else:
            at = tl.arange(0, BLOCK_N)[:, None] * ROWS + m[None, :]
            second = scratch + blocks * SPLITS * BLOCK_N * ROWS
            tl.store(scratch + (block * SPLITS + split) * BLOCK_N * ROWS + at, acc)
            if GATED:
                tl.store(second + (block * SPLITS + split) * BLOCK_N * ROWS + at, other)
            # The barrier makes the stores of all threads visible to the one whose atomic releases them.
            tl.debug_barrier()
            if tl.atomic_add(zeros + block, 1, sem="acq_rel") == SPLITS - 1:
                acc = _summed(scratch, block, BLOCK_N, ROWS, SPLITS)
                if GATED:
                    other = _summed(second, block, BLOCK_N, ROWS, SPLITS)
                _finish(
                    acc, other, bias, up_bias, residual, y, n, rows, m, count, residual_stride, BIAS, UP_BIAS, RESIDUAL,
                    KIND,
                )  # fmt: skip
                tl.store(zeros + block, 0)


@triton.jit(do_not_specialize=["count"])
def skinny_linear(
    x: tl.tensor, gain: tl.tensor, w0: tl.tensor, w1: tl.tensor, w2: tl.tensor, b0: tl.tensor, b1: tl.tensor,
    b2: tl.tensor, residual: tl.tensor, y0: tl.tensor, y1: tl.tensor, y2: tl.tensor, scratch: tl.tensor,
    zeros: tl.tensor, count: tl.tensor, n0: tl.tensor, n1: tl.tensor, n2: tl.tensor, x_stride: tl.tensor,
    w0_stride: tl.tensor, w1_stride: tl.tensor, w2_stride: tl.tensor, residual_stride: tl.tensor, eps: tl.float32,
    columns: tl.constexpr, WEIGHTS: tl.constexpr, NORM: tl.constexpr, B0: tl.constexpr, B1: tl.constexpr,
    B2: tl.constexpr, RESIDUAL: tl.constexpr, KIND: tl.constexpr, ROWS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
) -> None:  # fmt: skip
    """Program block · SPLITS + split: blocks of BLOCK_N rows of w0, then of w1 and w2, each into its own result.

    x [count, columns], weights [n, columns], results [count, n]; last strides are 1. WEIGHTS: how many results. B0 to
    B2: which have a bias. KIND: what is done to the first product and its bias, before the residual is added; "swiglu"
    takes the second product too, for one result. NORM: of one row, x is times `gain` over the root of its mean square
    + eps. zeros, int32, one for each block, is zero before and after.
    """
    block = tl.program_id(0) // SPLITS
    split = tl.program_id(0) % SPLITS
    blocks = tl.num_programs(0) // SPLITS
    first = tl.cdiv(n0, BLOCK_N)
    if block < first:
        _block(
            x, gain, w0, w1, b0, b1, residual, y0, scratch, zeros, block, block, split, count, n0, columns, x_stride,
            w0_stride, w1_stride, residual_stride, eps, blocks, NORM, B0, B1, RESIDUAL, KIND, ROWS, SPLITS, BLOCK_N,
            BLOCK_K,
        )  # fmt: skip
    if WEIGHTS > 1:
        second = first + tl.cdiv(n1, BLOCK_N)
        if (block >= first) & (block < second):
            _block(
                x, gain, w1, w1, b1, b1, residual, y1, scratch, zeros, block, block - first, split, count, n1, columns,
                x_stride, w1_stride, w1_stride, residual_stride, eps, blocks, NORM, B1, False, False, "none", ROWS,
                SPLITS, BLOCK_N, BLOCK_K,
            )  # fmt: skip
        if WEIGHTS > 2:
            third = block - second
            if third >= 0:
                _block(
                    x, gain, w2, w2, b2, b2, residual, y2, scratch, zeros, block, third, split, count, n2, columns,
                    x_stride, w2_stride, w2_stride, residual_stride, eps, blocks, NORM, B2, False, False, "none", ROWS,
                    SPLITS, BLOCK_N, BLOCK_K,
                )  # fmt: skip
