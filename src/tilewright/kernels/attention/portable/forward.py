"""FlashAttention-2 forward in Triton, for any GPU: limited by the matrix units (Dao, arXiv:2307.08691).

A program keeps a block of queries Q and walks over blocks of keys Kⱼ and values Vⱼ, with the maximum m (`peak`) and
the sum l (`mass`) of each row so far (Milakov and Gimelshein, arXiv:1805.02867):

    S  = scores(Q Kⱼᵀ)              m' = max(m, rowmax S)
    P  = 2^(S - m')                 l  = l · 2^(m - m') + rowsum P
    O  = O · 2^(m - m') + P Vⱼ      m  = m'

and ends with O / l and the log-sum-exp (m + log₂ l) · ln 2 (for fp32 in powers of e). Nothing of the size Sq × Sk
is ever written. Blocks outside of a causal or sliding band are skipped, and only blocks on its edges are masked.
Dropout zeroes elements of P before they meet V, not before they are summed.

On an H200, bf16, 16384 tokens, heads times size 2048, TFLOP/s beside FlashAttention-2 as PyTorch ships it, by
`tilewright bench attention --sweep portable`; geometric mean of these twelve 1.48 times it:

            S 512          S 1024         S 4096         S 16384
    d 64    340 / 265      292 / 216 c    488 / 304      480 / 296 c    64 x 128, four warps, two stages
    d 128   255 / 183 c    460 / 332      488 / 309 c    544 / 355      64 x 64, four warps, three stages
    d 256   359 / 284      323 / 247 c    537 / 325      550 / 297 c    128 x 64, eight warps, two stages

c: causal. One warpgroup a program, several of which take turns at the matrix units, wins until the result of 256
columns fills its registers. Lost at S 4096, full: d 64 with 128 x 64 in eight warps 407, 128 x 128 in eight 347;
d 128 with 128 x 128 in eight 478, 128 x 64 in eight 446; d 256 with 64 x 64 in four 427, with one stage 381.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.kernels.activation.formulas import rounded
from tilewright.kernels.attention.portable.tile import (
    LN2,
    kept,
    logarithm,
    power,
    product,
    rows,
    scores,
    sequence,
    store_rows,
)


@triton.jit
def key_range(
    first: tl.tensor, queries: tl.tensor, keys: tl.tensor, left: tl.tensor, right: tl.tensor,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Of queries [first, first + BLOCK_Q): where the keys that any sees begin, where those that all see begin
    and end, where all end; blocks of [begin, all begin) and [all end, end) need masking. Multiples of BLOCK_K
    but the last."""
    shift = keys - queries
    last = tl.minimum(first + BLOCK_Q, queries) - 1
    begin = keys * 0
    end = keys
    all_begin = keys * 0
    all_end = keys
    if LEFT:
        begin = tl.maximum(first + shift - left, 0) // BLOCK_K * BLOCK_K
        all_begin = tl.cdiv(tl.maximum(last + shift - left, 0), BLOCK_K) * BLOCK_K
    if RIGHT:
        end = tl.maximum(tl.minimum(keys, last + shift + right + 1), 0)
        all_end = tl.maximum(tl.minimum(keys, first + shift + right + 1), 0)
    all_end = all_end // BLOCK_K * BLOCK_K
    all_begin = tl.minimum(all_begin, tl.cdiv(end, BLOCK_K) * BLOCK_K)
    all_end = tl.maximum(all_end, all_begin)
    return begin, all_begin, all_end, end


@triton.jit
def _attend(
    acc: tl.tensor, mass: tl.tensor, peak: tl.tensor, q_tile: tl.tensor, k: tl.tensor, v: tl.tensor, mask: tl.tensor,
    state: tl.tensor, begin: tl.tensor, end: tl.tensor, first: tl.tensor, k_first: tl.tensor, batch: tl.tensor,
    kv_head: tl.tensor, random_row: tl.tensor, queries: tl.tensor, keys: tl.tensor, head_size: tl.tensor,
    value_size: tl.tensor, k_place: tl.tensor, v_place: tl.tensor, mask_query: tl.tensor, mask_key: tl.tensor,
    factor: tl.tensor, softcap: tl.tensor, slope: tl.tensor, left: tl.tensor, right: tl.tensor,
    threshold: tl.tensor,
    EDGE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    DESCRIBED: tl.constexpr, NATURAL: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """The state (acc, mass, peak) of a block of queries after the keys [begin, end) as well."""
    i = first + tl.arange(0, BLOCK_Q)[:, None]
    PLAIN: tl.constexpr = not (EDGE or SOFTCAP or ALIBI or MASK != "none")
    for start in tl.range(begin, end, BLOCK_K):
        k_tile = rows(
            k, batch, kv_head, k_first + start, k_first + keys, head_size, k_place, BLOCK_K, WIDTH, WHOLE, DESCRIBED
        )
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        if PLAIN:
            # factor ≥ 0, so the largest product is the largest score.
            new = tl.maximum(peak, tl.max(s, 1) * factor)
            p = power(s * factor - new[:, None], NATURAL)
            decay = power(peak - new, NATURAL)
        else:
            j = start + tl.arange(0, BLOCK_K)[None, :]
            s, _ = scores(
                s, i, j, queries, keys, factor, softcap, slope, mask, mask_query, mask_key, left, right,
                EDGE, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, NATURAL,
            )  # fmt: skip
            new = tl.maximum(peak, tl.max(s, 1))
            # A row that has seen no key yet: -inf - -inf would be NaN.
            base = tl.where(new == float("-inf"), 0.0, new)
            p = power(s - base[:, None], NATURAL)
            decay = power(peak - base, NATURAL)
        mass = mass * decay + tl.sum(p, 1)
        acc = acc * decay[:, None]
        if DROPS:
            p = tl.where(kept(state, random_row, start, threshold, BLOCK_Q, BLOCK_K), p, 0.0)
        v_tile = rows(
            v, batch, kv_head, k_first + start, k_first + keys, value_size, v_place, BLOCK_K, VALUE_WIDTH, WHOLE,
            DESCRIBED,
        )  # fmt: skip
        acc = product(rounded(p, v_tile.dtype), v_tile, acc, PRECISION, NATURAL)
        peak = new
    return acc, mass, peak


@triton.jit(do_not_specialize=["left", "right", "threshold"])
def forward(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, lse: tl.tensor, level: tl.tensor | None,
    mask: tl.tensor, slopes: tl.tensor, starts_q: tl.tensor, starts_k: tl.tensor, state: tl.tensor,
    heads: tl.tensor, group: tl.tensor, blocks: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    head_size: tl.constexpr, value_size: tl.constexpr,
    q_batch: tl.tensor, q_head: tl.tensor, q_place: tl.tensor, k_batch: tl.tensor, k_head: tl.tensor,
    k_place: tl.tensor, v_batch: tl.tensor, v_head: tl.tensor, v_place: tl.tensor, out_batch: tl.tensor,
    out_head: tl.tensor, out_place: tl.tensor, mask_batch: tl.tensor, mask_head: tl.tensor, mask_query: tl.tensor,
    mask_key: tl.tensor, factor: tl.float32, softcap: tl.float32, left: tl.int32, right: tl.int32,
    threshold: tl.int64, kept_scale: tl.float32,
    NEGATED: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, DROPS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, DESCRIBED: tl.constexpr,
) -> None:  # fmt: skip
    """Program (sequence · heads + head) · blocks + block, counted from the last where RIGHT: the longest first.

    `factor` and `softcap` are what `scores` takes, for |scale|: the queries are negated where NEGATED.
    out [batch, head, query, :] and lse [batch, head, query], which is contiguous.
    level, which is there for fp32, is lse in fp64, and +inf for a query that sees no key.
    """
    NATURAL: tl.constexpr = level is not None
    block = tl.program_id(0) % blocks
    if RIGHT:
        block = blocks - 1 - block
    first = block * BLOCK_Q
    head = tl.program_id(0) // blocks % heads
    index = tl.program_id(0) // blocks // heads
    kv_head = head // group
    total = queries
    batch, q_first, k_first, queries, keys = sequence(starts_q, starts_k, index, queries, keys, PACKED)
    if first >= queries:
        return
    wide_batch = batch.to(tl.int64)
    if not DESCRIBED:
        q += wide_batch * q_batch + head.to(tl.int64) * q_head
        k += wide_batch * k_batch + kv_head.to(tl.int64) * k_head
        v += wide_batch * v_batch + kv_head.to(tl.int64) * v_head
    out += wide_batch * out_batch + head.to(tl.int64) * out_head
    lane = (wide_batch * heads + head) * total + q_first
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + index * heads + head)
    if MASK != "none":
        mask += wide_batch * mask_batch + head.to(tl.int64) * mask_head
    q_tile = rows(
        q, batch, head, q_first + first, q_first + queries, head_size, q_place, BLOCK_Q, WIDTH, WHOLE, DESCRIBED
    )
    if NEGATED:
        q_tile = -q_tile
    place = first + tl.arange(0, BLOCK_Q)
    random_row = lane + place
    acc = tl.zeros([BLOCK_Q, VALUE_WIDTH], tl.float32)
    mass = tl.zeros([BLOCK_Q], tl.float32)
    peak = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    begin, all_begin, all_end, end = key_range(first, queries, keys, left, right, BLOCK_Q, BLOCK_K, LEFT, RIGHT)
    if LEFT:
        acc, mass, peak = _attend(
            acc, mass, peak, q_tile, k, v, mask, state, begin, all_begin, first, k_first, batch, kv_head, random_row,
            queries, keys, head_size, value_size, k_place, v_place, mask_query, mask_key, factor, softcap, slope,
            left, right, threshold, True, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, DROPS, PRECISION, BLOCK_Q, BLOCK_K,
            WIDTH, VALUE_WIDTH, WHOLE, DESCRIBED, NATURAL,
        )  # fmt: skip
    acc, mass, peak = _attend(
        acc, mass, peak, q_tile, k, v, mask, state, all_begin, all_end, first, k_first, batch, kv_head, random_row,
        queries, keys, head_size, value_size, k_place, v_place, mask_query, mask_key, factor, softcap, slope,
        left, right, threshold, False, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, DROPS, PRECISION, BLOCK_Q, BLOCK_K,
        WIDTH, VALUE_WIDTH, WHOLE, DESCRIBED, NATURAL,
    )  # fmt: skip
    acc, mass, peak = _attend(
        acc, mass, peak, q_tile, k, v, mask, state, all_end, end, first, k_first, batch, kv_head, random_row,
        queries, keys, head_size, value_size, k_place, v_place, mask_query, mask_key, factor, softcap, slope,
        left, right, threshold, True, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, DROPS, PRECISION, BLOCK_Q, BLOCK_K,
        WIDTH, VALUE_WIDTH, WHOLE, DESCRIBED, NATURAL,
    )  # fmt: skip
    empty = mass == 0.0
    acc *= tl.where(empty, 0.0, kept_scale / mass)[:, None]
    if not NATURAL:
        sums = (peak + logarithm(mass, NATURAL)) * LN2
    else:
        # In fp32 a sum in the hundreds would cost the weights that backward draws from it half their digits.
        sums = peak.to(tl.float64) + logarithm(mass, NATURAL).to(tl.float64)
        tl.store(level + lane + place, tl.where(empty, float("inf"), sums), mask=place < queries)
    sums = tl.where(empty, float("-inf"), sums)
    tl.store(lse + lane + place, sums.to(tl.float32), mask=place < queries)
    store_rows(out, acc, q_first + first, q_first + queries, value_size, out_place, BLOCK_Q, VALUE_WIDTH, WHOLE)
