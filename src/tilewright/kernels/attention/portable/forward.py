"""FlashAttention-2 forward in Triton, for any GPU (Dao, arXiv:2307.08691).

A program keeps a block of queries Q and loops over blocks of keys Kⱼ and values Vⱼ, with the running maximum m
(`row_max`) and sum l (`row_sum`) of each row (Milakov and Gimelshein, arXiv:1805.02867):

    S  = scores(Q Kⱼᵀ)              m' = max(m, rowmax S)
    P  = 2^(S - m')                 l  = l · 2^(m - m') + rowsum P
    O  = O · 2^(m - m') + P Vⱼ      m  = m'

It stores O / l and the log-sum-exp (m + log₂ l) · ln 2 (for fp32 in powers of e). Blocks outside of a causal or sliding
band are skipped, and only those on its edges are masked. Dropout zeroes P after it was summed.

Limit: the matrix units. On an H200 1.48 times FlashAttention-2 as PyTorch ships it (docs/experiments.md).
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import rounded
from tilewright.kernels.attention.portable.tile import (
    LN2,
    dot_accumulate,
    dropout_mask,
    exponential,
    load_mask,
    load_rows,
    logarithm,
    scores,
    sequence_bounds,
    store_rows,
)


@triton.jit
def key_range(
    first: tl.tensor, queries: tl.tensor, keys: tl.tensor, left: tl.tensor, right: tl.tensor,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """(begin, full_begin, full_end, end) of the keys of queries [first, first + BLOCK_Q): some query sees those from
    begin to end, all see those from full_begin to full_end. Multiples of BLOCK_K but for end."""
    shift = keys - queries
    last = tl.minimum(first + BLOCK_Q, queries) - 1
    begin = keys * 0
    end = keys
    full_begin = keys * 0
    full_end = keys
    if LEFT:
        begin = tl.maximum(first + shift - left, 0) // BLOCK_K * BLOCK_K
        full_begin = tl.cdiv(tl.maximum(last + shift - left, 0), BLOCK_K) * BLOCK_K
    if RIGHT:
        end = tl.maximum(tl.minimum(keys, last + shift + right + 1), 0)
        full_end = tl.maximum(tl.minimum(keys, first + shift + right + 1), 0)
    full_end = full_end // BLOCK_K * BLOCK_K
    full_begin = tl.minimum(full_begin, tl.cdiv(end, BLOCK_K) * BLOCK_K)
    full_end = tl.maximum(full_end, full_begin)
    return begin, full_begin, full_end, end


@triton.jit
def attend_keys(
    acc: tl.tensor, row_sum: tl.tensor, row_max: tl.tensor, q_tile: tl.tensor, k: tl.tensor, v: tl.tensor,
    mask: tl.tensor, state: tl.tensor, begin: tl.tensor, end: tl.tensor, i: tl.tensor, k_first: tl.tensor,
    batch: tl.tensor, kv_head: tl.tensor, dropout_row: tl.tensor, queries: tl.tensor, keys: tl.tensor, seen: tl.tensor,
    head_size: tl.tensor, value_size: tl.tensor, k_stride_s: tl.tensor, v_stride_s: tl.tensor, mask_stride_q: tl.tensor,
    mask_stride_k: tl.tensor, factor: tl.tensor, softcap: tl.tensor, slope: tl.tensor, left: tl.tensor,
    right: tl.tensor, threshold: tl.tensor, EDGE: tl.constexpr, PREFIX: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, NO_PADDING: tl.constexpr, TMA: tl.constexpr, NATURAL: tl.constexpr,
    MASK_AHEAD: tl.constexpr, ONE_MASK: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """(acc, row_sum, row_max) of a block of queries i [BLOCK_Q, 1], with the keys [begin, end) added.

    PREFIX: those below `seen` alone. MASK_AHEAD: a block's mask is loaded a block ahead, where its tile is small and
    little else hides how long that takes. ONE_MASK: all rows have the mask's first row.
    """
    PLAIN: tl.constexpr = not (EDGE or SOFTCAP or ALIBI or MASK != "none")
    block = tl.arange(0, BLOCK_K)[None, :]
    if MASK_AHEAD:
        ahead = load_mask(mask, i, begin + block, queries, end, mask_stride_q, mask_stride_k, MASK, ONE_MASK)
    for start in tl.range(begin, end, BLOCK_K):
        k_tile = load_rows(
            k, batch, kv_head, k_first + start, k_first + keys, head_size, k_stride_s, BLOCK_K, WIDTH, NO_PADDING, TMA
        )
        j = start + block
        if MASK_AHEAD:
            mask_tile = ahead
            ahead = load_mask(mask, i, j + BLOCK_K, queries, end, mask_stride_q, mask_stride_k, MASK, ONE_MASK)
        s = tl.dot(q_tile.to(k_tile.dtype), tl.trans(k_tile), input_precision=PRECISION)
        if PLAIN:
            # factor ≥ 0, so the largest product is the largest score.
            new_max = tl.maximum(row_max, tl.max(s, 1) * factor)
            p = exponential(s * factor - new_max[:, None], NATURAL)
            rescale = exponential(row_max - new_max, NATURAL)
        else:
            if not MASK_AHEAD:
                mask_tile = load_mask(mask, i, j, queries, keys, mask_stride_q, mask_stride_k, MASK, ONE_MASK)
            s, _ = scores(
                s, i, j, queries, keys, factor, softcap, slope, mask_tile, left, right,
                EDGE, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, NATURAL,
            )  # fmt: skip
            if PREFIX:
                s = tl.where(j < seen, s, float("-inf"))
            new_max = tl.maximum(row_max, tl.max(s, 1))
            # A row that has seen no key yet: -inf - -inf would be NaN.
            base = tl.where(new_max == float("-inf"), 0.0, new_max)
            p = exponential(s - base[:, None], NATURAL)
            rescale = exponential(row_max - base, NATURAL)
        row_sum = row_sum * rescale + tl.sum(p, 1)
        acc = acc * rescale[:, None]
        if DROPOUT:
            p = tl.where(dropout_mask(state, dropout_row, start, threshold, BLOCK_Q, BLOCK_K), p, 0.0)
        v_tile = load_rows(
            v, batch, kv_head, k_first + start, k_first + keys, value_size, v_stride_s, BLOCK_K, VALUE_WIDTH,
            NO_PADDING, TMA,
        )  # fmt: skip
        acc = dot_accumulate(rounded(p, v_tile.dtype), v_tile, acc, PRECISION, NATURAL)
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit(do_not_specialize=["left", "right", "threshold"])
def forward(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, lse: tl.tensor, lse64: tl.tensor | None, mask: tl.tensor,
    slopes: tl.tensor, starts_q: tl.tensor, starts_k: tl.tensor, state: tl.tensor, heads: tl.tensor, group: tl.tensor,
    blocks: tl.tensor, queries: tl.tensor, keys: tl.tensor, head_size: tl.constexpr, value_size: tl.constexpr,
    q_stride_b: tl.tensor, q_stride_h: tl.tensor, q_stride_s: tl.tensor, k_stride_b: tl.tensor, k_stride_h: tl.tensor,
    k_stride_s: tl.tensor, v_stride_b: tl.tensor, v_stride_h: tl.tensor, v_stride_s: tl.tensor, out_stride_b: tl.tensor,
    out_stride_h: tl.tensor, out_stride_s: tl.tensor, mask_stride_b: tl.tensor, mask_stride_h: tl.tensor,
    mask_stride_q: tl.tensor, mask_stride_k: tl.tensor, factor: tl.float32, softcap: tl.float32, left: tl.int32,
    right: tl.int32, threshold: tl.int64, dropout_scale: tl.float32, NEGATED: tl.constexpr, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, NO_PADDING: tl.constexpr, TMA: tl.constexpr,
) -> None:  # fmt: skip
    """Program (sequence · heads + head) · blocks + block; where RIGHT the last block first, since it is the longest.

    Stores out [batch, head, query, :], lse [batch, head, query], contiguous, and for fp32 lse64: lse in fp64, +inf for
    a query that sees no key. `factor` and `softcap` are those of `scores` for |scale|; NEGATED negates the queries.
    """
    NATURAL: tl.constexpr = lse64 is not None
    block = tl.program_id(0) % blocks
    if RIGHT:
        block = blocks - 1 - block
    first = block * BLOCK_Q
    head = tl.program_id(0) // blocks % heads
    index = tl.program_id(0) // blocks // heads
    kv_head = head // group
    all_queries = queries
    batch, q_first, k_first, queries, keys = sequence_bounds(starts_q, starts_k, index, queries, keys, PACKED)
    if first >= queries:
        return
    batch64 = batch.to(tl.int64)
    if not TMA:
        q += batch64 * q_stride_b + head.to(tl.int64) * q_stride_h
        k += batch64 * k_stride_b + kv_head.to(tl.int64) * k_stride_h
        v += batch64 * v_stride_b + kv_head.to(tl.int64) * v_stride_h
    out += batch64 * out_stride_b + head.to(tl.int64) * out_stride_h
    row_start = (batch64 * heads + head) * all_queries + q_first
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + index * heads + head)
    if MASK != "none":
        mask += batch64 * mask_stride_b + head.to(tl.int64) * mask_stride_h
    q_tile = load_rows(
        q, batch, head, q_first + first, q_first + queries, head_size, q_stride_s, BLOCK_Q, WIDTH, NO_PADDING, TMA
    )
    if NEGATED:
        q_tile = -q_tile
    position = first + tl.arange(0, BLOCK_Q)
    dropout_row = row_start + position
    acc = tl.zeros([BLOCK_Q, VALUE_WIDTH], tl.float32)
    row_sum = tl.zeros([BLOCK_Q], tl.float32)
    row_max = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    bounds = key_range(first, queries, keys, left, right, BLOCK_Q, BLOCK_K, LEFT, RIGHT)
    # Keys that only some queries may see, that all see, and that only some may see.
    for PART in tl.static_range(0 if LEFT else 1, 3):
        acc, row_sum, row_max = attend_keys(
            acc, row_sum, row_max, q_tile, k, v, mask, state, bounds[PART], bounds[PART + 1], position[:, None],
            k_first, batch, kv_head, dropout_row, queries, keys, None, head_size, value_size, k_stride_s, v_stride_s,
            mask_stride_q, mask_stride_k, factor, softcap, slope, left, right, threshold, PART != 1, False, LEFT, RIGHT,
            SOFTCAP, ALIBI, MASK, DROPOUT, PRECISION, BLOCK_Q, BLOCK_K, WIDTH, VALUE_WIDTH, NO_PADDING, TMA, NATURAL,
            False, False,
        )  # fmt: skip
    empty = row_sum == 0.0
    acc *= tl.where(empty, 0.0, dropout_scale / row_sum)[:, None]
    if not NATURAL:
        lse_tile = (row_max + logarithm(row_sum, NATURAL)) * LN2
    else:
        # Rounded to fp32, a log-sum-exp in the hundreds would cost the backward's P half of their digits.
        lse_tile = row_max.to(tl.float64) + logarithm(row_sum, NATURAL).to(tl.float64)
        tl.store(lse64 + row_start + position, tl.where(empty, float("inf"), lse_tile), mask=position < queries)
    lse_tile = tl.where(empty, float("-inf"), lse_tile)
    tl.store(lse + row_start + position, lse_tile.to(tl.float32), mask=position < queries)
    store_rows(out, acc, q_first + first, q_first + queries, value_size, out_stride_s, BLOCK_Q, VALUE_WIDTH, NO_PADDING)
