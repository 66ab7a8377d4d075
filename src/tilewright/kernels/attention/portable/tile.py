"""Tiles of the portable attention kernels: loads and stores of rows, scores of a tile of products, dropout masks.

Scores of 16-bit inputs are powers of two: with c = scale · log₂ e, exp(scale · qk) = 2^(c · qk), one multiply-add and
one instruction. Those of fp32 are powers of e (NATURAL): for scores in the hundreds, rounding c would show in P.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import INTERPRETED, rounded
from tilewright.emit.triton_draw import low, philox

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_rows(
    x: tl.tensor, batch: tl.tensor, head: tl.tensor, first: tl.tensor, end: tl.tensor, width: tl.tensor,
    stride: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, NO_PADDING: tl.constexpr, TMA: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Rows [first, first + ROWS) of one head as [ROWS, COLUMNS], zero from row `end` and column `width` on.

    `x` points to row 0 of the head or, where TMA, is a tensor descriptor of [batch, head, row, column], which gives
    zeros outside of the tensor. NO_PADDING: COLUMNS is `width`.
    """
    if TMA:
        return tl.reshape(x.load([batch, head, first, 0]), [ROWS, COLUMNS])
    else:
        row = tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, COLUMNS)[None, :]
        inside = row < end - first
        if not NO_PADDING:
            inside &= column < width
        tile = tl.load(x + first.to(tl.int64) * stride + row * stride + column, mask=inside, other=0.0)
        # The interpreter multiplies the bits of bf16 as if they were integers.
        return tile.to(tl.float32) if INTERPRETED else tile


@triton.jit
def store_rows(
    x: tl.tensor, tile: tl.tensor, first: tl.tensor, end: tl.tensor, width: tl.tensor, stride: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, NO_PADDING: tl.constexpr,
) -> None:  # fmt: skip
    """Stores what `load_rows` loads; `x` points to row 0."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = row < end - first
    if not NO_PADDING:
        inside &= column < width
    tl.store(x + first.to(tl.int64) * stride + row * stride + column, rounded(tile, x.dtype.element_ty), mask=inside)


@triton.jit
def tanh_and_slope(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Hyperbolic tangent to about an ulp of fp32, and its derivative.

    Near zero Cephes' polynomial (tanhf.c, Moshier); else 1 - r for x > 0, with r = 2 / (e^2x + 1). The derivative is
    r (2 - r), since 1 - tanh² cancels where tanh is nearly one.
    """
    z = x * x
    near = ((((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
            - 3.33332819422e-1) * z * x + x  # fmt: skip
    rest = 2.0 / (tl.exp2(2.0 * LOG2E * tl.abs(x)) + 1.0)
    far = tl.where(x < 0.0, rest - 1.0, 1.0 - rest)
    is_near = tl.abs(x) < 0.625
    return tl.where(is_near, near, far), tl.where(is_near, 1.0 - near * near, rest * (2.0 - rest))


@triton.jit
def exponential(x: tl.tensor, NATURAL: tl.constexpr) -> tl.tensor:
    """e^x where NATURAL, else 2^x."""
    return tl.exp(x) if NATURAL else tl.exp2(x)


@triton.jit
def logarithm(x: tl.tensor, NATURAL: tl.constexpr) -> tl.tensor:
    """The inverse of `exponential`."""
    return tl.log(x) if NATURAL else tl.log2(x)


@triton.jit
def dot_accumulate(
    a: tl.tensor, b: tl.tensor, acc: tl.tensor, PRECISION: tl.constexpr, NATURAL: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """acc + a b. Where NATURAL the block is summed alone: one chain of fp32 over thousands of keys loses digits."""
    if NATURAL:
        # An fma, since the compiler would fold a plain sum into the product.
        return tl.fma(acc, 1.0, tl.dot(a, b, input_precision=PRECISION))
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def load_mask(
    mask: tl.tensor, i: tl.tensor, j: tl.tensor, queries: tl.tensor, keys: tl.tensor, stride_q: tl.tensor,
    stride_k: tl.tensor, MASK: tl.constexpr, ALL_ROWS: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """The mask of a tile's queries `i` and keys `j`, 0 outside; ALL_ROWS: the rows share the row at `mask`.

    Without a mask anything, which `scores` does not read.
    """
    if MASK == "none":
        return j
    else:
        at = j.to(tl.int64) * stride_k
        inside = j < keys
        if not ALL_ROWS:
            at += i.to(tl.int64) * stride_q
            inside &= i < queries
        return tl.load(mask + at, mask=inside, other=0)


@triton.jit
def scores(
    products: tl.tensor, i: tl.tensor, j: tl.tensor, queries: tl.tensor, keys: tl.tensor, factor: tl.tensor,
    softcap: tl.tensor, slope: tl.tensor, mask_tile: tl.tensor, left: tl.tensor, right: tl.tensor,
    EDGE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, NATURAL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(scores, derivative of the soft cap) of a tile of products q·k; -inf where a key is hidden.

    `i` and `j` are the tile's queries and keys and broadcast to its shape, of which either may be the rows, and so does
    `mask_tile`, of `load_mask`. `factor` is scale, or scale / softcap where SOFTCAP. Unless NATURAL, scores are times
    log₂ e, which `factor` or, where SOFTCAP, `softcap` already holds. EDGE: positions may hide keys of the tile, or
    keys may not exist.
    """
    UNIT: tl.constexpr = 1.0 if NATURAL else 1.4426950408889634
    cap_slope = 1.0
    if SOFTCAP:
        capped, cap_slope = tanh_and_slope(products * factor)
        products = capped * softcap
    else:
        products = products * factor
    position = j - i - (keys - queries)
    if ALIBI:
        products -= slope * UNIT * tl.abs(position).to(tl.float32)
    if MASK == "additive":
        products += mask_tile.to(tl.float32) * UNIT
    if MASK == "boolean":
        products = tl.where(mask_tile != 0, products, float("-inf"))
    if EDGE:
        visible = j < keys
        if LEFT:
            visible &= position >= -left
        if RIGHT:
            visible &= position <= right
        products = tl.where(visible, products, float("-inf"))
    return products, cap_slope


@triton.jit
def dropout_mask(
    state: tl.tensor, row: tl.tensor, first: tl.tensor, threshold: tl.tensor, ROWS: tl.constexpr, KEYS: tl.constexpr
) -> tl.tensor:
    """bool [ROWS, KEYS]: which weights of keys [first, first + KEYS) dropout keeps; `first` is a multiple of 4.

    Row r of the scores [batch, head, query] is subsequence r of Philox4x32-10 keyed by the seed; key j has word
    j mod 4 of its call offset/4 + ⌊j/4⌋, as if r were a thread of cuRAND's.
    """
    seed = tl.load(state)
    call = (tl.load(state + 1) >> 2) + first // 4 + tl.arange(0, KEYS // 4)
    call = call.to(tl.int64)[None, :]
    row = row.to(tl.int64)[:, None]
    w0, w1, w2, w3 = philox(low(seed), low(seed >> 32), low(call), low(call >> 32), low(row), low(row >> 32))
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [ROWS, KEYS])
    return words < threshold.to(tl.uint32)


@triton.jit
def sequence_bounds(
    starts_q: tl.tensor, starts_k: tl.tensor, index: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    PACKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Batch entry, first query, first key, queries and keys of batch entry or packed sequence `index`."""
    if PACKED:
        q_first = tl.load(starts_q + index)
        k_first = tl.load(starts_k + index)
        queries = tl.load(starts_q + index + 1) - q_first
        keys = tl.load(starts_k + index + 1) - k_first
        return index * 0, q_first, k_first, queries, keys
    else:
        return index, index * 0, index * 0, queries, keys
