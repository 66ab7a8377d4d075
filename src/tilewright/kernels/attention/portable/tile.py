"""What the attention kernels share: tiles of rows, what becomes of a tile of products, the dropout mask.

Scores of 16-bit inputs are in powers of two: with c = scale · log₂e, exp(scale · qk) = 2^(c · qk), which is one
multiply-add and the machine's own exponential. Those of fp32 are in powers of e (NATURAL), for in the hundreds
the rounding of c would be seen in the weights.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.kernels.activation.formulas import INTERPRETED, rounded
from tilewright.kernels.dropout_add.triton import philox

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def rows(
    x: tl.tensor, batch: tl.tensor, head: tl.tensor, first: tl.tensor, end: tl.tensor, width: tl.tensor,
    stride: tl.tensor, ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr, DESCRIBED: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Rows [first, first + ROWS) of one head as [ROWS, COLUMNS], zero from row `end` and column `width` on.

    `x` points to row 0 of the head; or, where DESCRIBED, is a tensor descriptor of [batch, head, row, column],
    which is zero where there is nothing. WHOLE: there are no columns beyond `width`.
    """
    if DESCRIBED:
        return tl.reshape(x.load([batch, head, first, 0]), [ROWS, COLUMNS])
    else:
        row = tl.arange(0, ROWS)[:, None]
        column = tl.arange(0, COLUMNS)[None, :]
        inside = row < end - first
        if not WHOLE:
            inside &= column < width
        tile = tl.load(x + first.to(tl.int64) * stride + row * stride + column, mask=inside, other=0.0)
        # The interpreter multiplies the bits of bf16 as if they were integers.
        return tile.to(tl.float32) if INTERPRETED else tile


@triton.jit
def store_rows(
    x: tl.tensor, tile: tl.tensor, first: tl.tensor, end: tl.tensor, width: tl.tensor, stride: tl.tensor,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
) -> None:  # fmt: skip
    """The counterpart of `rows`; `x` points to row 0."""
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = row < end - first
    if not WHOLE:
        inside &= column < width
    tl.store(x + first.to(tl.int64) * stride + row * stride + column, rounded(tile, x.dtype.element_ty), mask=inside)


@triton.jit
def tanh(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Hyperbolic tangent to about an ulp of fp32, and its slope.

    Near zero Cephes' polynomial (tanhf.c, Moshier). Else 1 - r for x > 0, with r = 2 / (e^2x + 1), and the slope is
    r (2 - r): 1 - tanh² would keep no digit where tanh is nearly one.
    """
    z = x * x
    near = ((((-5.70498872745e-3 * z + 2.06390887954e-2) * z - 5.37397155531e-2) * z + 1.33314422036e-1) * z
            - 3.33332819422e-1) * z * x + x  # fmt: skip
    rest = 2.0 / (tl.exp2(2.0 * LOG2E * tl.abs(x)) + 1.0)
    far = tl.where(x < 0.0, rest - 1.0, 1.0 - rest)
    is_near = tl.abs(x) < 0.625
    return tl.where(is_near, near, far), tl.where(is_near, 1.0 - near * near, rest * (2.0 - rest))


@triton.jit
def power(x: tl.tensor, NATURAL: tl.constexpr) -> tl.tensor:
    """e^x where NATURAL, else 2^x."""
    return tl.exp(x) if NATURAL else tl.exp2(x)


@triton.jit
def logarithm(x: tl.tensor, NATURAL: tl.constexpr) -> tl.tensor:
    """The inverse of `power`."""
    return tl.log(x) if NATURAL else tl.log2(x)


@triton.jit
def product(
    a: tl.tensor, b: tl.tensor, acc: tl.tensor, PRECISION: tl.constexpr, NATURAL: tl.constexpr
) -> tl.tensor:  # fmt: skip
    """acc + a b. Where NATURAL the block is summed alone: one chain of fp32 over thousands would be too rough."""
    if NATURAL:
        # Not a sum, which the compiler would make one with the product again.
        return tl.fma(acc, 1.0, tl.dot(a, b, input_precision=PRECISION))
    else:
        return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def scores(
    products: tl.tensor, i: tl.tensor, j: tl.tensor, queries: tl.tensor, keys: tl.tensor, factor: tl.tensor,
    softcap: tl.tensor, slope: tl.tensor, mask: tl.tensor, mask_query: tl.tensor, mask_key: tl.tensor,
    left: tl.tensor, right: tl.tensor,
    EDGE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, NATURAL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(scores, slope of the soft cap) of a tile of products q·k; -inf where a key is not seen.

    `i` and `j` are the tile's queries and keys, of shapes that broadcast to the tile's, which may lie either
    way. `factor` is scale, or scale / softcap where SOFTCAP. Unless NATURAL, the scores are times log₂e, and so
    are `factor` or, where SOFTCAP, `softcap` already.
    EDGE: the tile may hold keys that its queries do not see by place, or that do not exist.
    """
    UNIT: tl.constexpr = 1.0 if NATURAL else 1.4426950408889634
    bend = 1.0
    if SOFTCAP:
        bent, bend = tanh(products * factor)
        products = bent * softcap
    else:
        products = products * factor
    place = j - i - (keys - queries)
    if ALIBI:
        products -= slope * UNIT * tl.abs(place).to(tl.float32)
    inside = (i < queries) & (j < keys)
    if MASK == "additive":
        at = i.to(tl.int64) * mask_query + j.to(tl.int64) * mask_key
        products += tl.load(mask + at, mask=inside, other=0.0).to(tl.float32) * UNIT
    if MASK == "boolean":
        at = i.to(tl.int64) * mask_query + j.to(tl.int64) * mask_key
        products = tl.where(tl.load(mask + at, mask=inside, other=0) != 0, products, float("-inf"))
    if EDGE:
        visible = j < keys
        if LEFT:
            visible &= place >= -left
        if RIGHT:
            visible &= place <= right
        products = tl.where(visible, products, float("-inf"))
    return products, bend


@triton.jit
def _low(x: tl.tensor) -> tl.tensor:
    return (x & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def kept(
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
    w0, w1, w2, w3 = philox(_low(seed), _low(seed >> 32), _low(call), _low(call >> 32), _low(row), _low(row >> 32))
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [ROWS, KEYS])
    return words < threshold.to(tl.uint32)


@triton.jit
def sequence(
    starts_q: tl.tensor, starts_k: tl.tensor, index: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    PACKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Of batch entry or packed sequence `index`: its entry, its first query and key there, and its lengths."""
    if PACKED:
        q_first = tl.load(starts_q + index)
        k_first = tl.load(starts_k + index)
        queries = tl.load(starts_q + index + 1) - q_first
        keys = tl.load(starts_k + index + 1) - k_first
        return index * 0, q_first, k_first, queries, keys
    else:
        return index, index * 0, index * 0, queries, keys
