"""Attention of few queries against a long cache, split over the keys (Flash-Decoding, Dao 2023), in Triton.

Each program takes a split of one key head's keys, with the queries of all heads that share it as the rows of one tile,
so that keys and values are read once. It leaves O and the log-sum-exp L of its keys; the last program of a key head
combines the splits:

    L = log Σₚ exp(Lₚ)              O = Σₚ exp(Lₚ - L) · Oₚ

Limit: memory. On an H200 0.98 to 1.07 of the copy bandwidth for caches of 1 GB and more; 134 MB take 39.9 µs, and
reading them alone takes 33.2 (both with a clean L2). docs/experiments.md has the variants that lost.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import rounded
from tilewright.kernels.attention.portable.forward import attend_keys
from tilewright.kernels.attention.portable.tile import LN2

UNROLL = tl.constexpr(4)
"""Splits whose loads are in flight together while they are combined."""


@triton.jit
def _first_hidden(
    prefix: tl.tensor, more: tl.tensor, valid: tl.tensor, origin: tl.tensor, limit: tl.tensor, ELSE_ALL: tl.constexpr
) -> tl.tensor:
    """The first key that each row's prefix hides: `limit` at most; `origin` for rows of padding."""
    hidden = tl.load(prefix, mask=valid, other=0) + more
    if ELSE_ALL:
        hidden = tl.where(hidden > 0, hidden, limit)
    return tl.where(valid, tl.minimum(hidden, limit), origin).to(tl.int32)


@triton.jit(do_not_specialize=["left", "right", "origin", "limit", "more"])
def decode(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, lse: tl.tensor, scratch: tl.tensor, counters: tl.tensor,
    mask: tl.tensor, slopes: tl.tensor, prefix: tl.tensor, heads: tl.tensor, group: tl.tensor, splits: tl.tensor,
    length: tl.tensor, origin: tl.tensor, limit: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    head_size: tl.constexpr, value_size: tl.constexpr, q_stride_b: tl.tensor, q_stride_h: tl.tensor,
    q_stride_s: tl.tensor, k_stride_b: tl.tensor, k_stride_h: tl.tensor, k_stride_s: tl.tensor, v_stride_b: tl.tensor,
    v_stride_h: tl.tensor, v_stride_s: tl.tensor, out_stride_b: tl.tensor, out_stride_h: tl.tensor,
    out_stride_s: tl.tensor, mask_stride_b: tl.tensor, mask_stride_h: tl.tensor, mask_stride_q: tl.tensor,
    mask_stride_k: tl.tensor, prefix_stride_b: tl.tensor, prefix_stride_q: tl.tensor, more: tl.int32,
    factor: tl.float32, softcap: tl.float32, left: tl.int32, right: tl.int32, PREFIX: tl.constexpr,
    ELSE_ALL: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    NO_PADDING: tl.constexpr, ROWS: tl.constexpr, TMA: tl.constexpr, SPLITS: tl.constexpr,
    ONE_MASK: tl.constexpr,
) -> None:  # fmt: skip
    """Program (batch · key heads + key head) · splits + split: all queries, keys from origin + split · length on.

    Row r of the tile is query r mod `queries` of the group's head r // queries. Keys before `origin` and from `limit`
    on are hidden from all. SPLITS is `splits`, padded to a power of two. For several splits, scratch (fp32) holds O of
    each [program, row, :], then L of each [program, row], 0 and -inf where all keys of a split are hidden; counters,
    int32 [batch · key heads], is zero before and after. PREFIX: query i sees keys below prefix[batch, i] + `more`, and
    the splits divide the keys that some query sees; ELSE_ALL: a query with an empty prefix sees all keys. ONE_MASK: all
    rows share one row of the mask. The rest is as in `forward`; `factor` may be negative.
    """
    split = tl.program_id(0) % splits
    kv_index = tl.program_id(0) // splits
    kv_heads = heads // group
    kv_head = kv_index % kv_heads
    batch = kv_index // kv_heads
    batch64 = batch.to(tl.int64)
    row = tl.arange(0, ROWS)
    head = kv_head * group + row // queries
    i = row % queries
    valid = row < group * queries
    column = tl.arange(0, WIDTH)[None, :]
    at = q + batch64 * q_stride_b + (head.to(tl.int64) * q_stride_h + i * q_stride_s)[:, None] + column
    q_tile = tl.load(at, mask=valid[:, None] & (column < head_size), other=0.0)
    out += batch64 * out_stride_b + (head.to(tl.int64) * out_stride_h + i * out_stride_s)[:, None]
    lse += (batch64 * heads + head) * queries + i
    if not TMA:
        k += batch64 * k_stride_b + kv_head.to(tl.int64) * k_stride_h
        v += batch64 * v_stride_b + kv_head.to(tl.int64) * v_stride_h
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + batch * heads + head, mask=valid, other=0.0)[:, None]
    if MASK != "none":
        mask += batch64 * mask_stride_b
        if not ONE_MASK:
            mask = mask + (head.to(tl.int64) * mask_stride_h)[:, None]
    acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    row_sum = tl.zeros([ROWS], tl.float32)
    row_max = tl.full([ROWS], float("-inf"), tl.float32)
    seen = 0
    if PREFIX:
        first_hidden = _first_hidden(
            prefix + batch64 * prefix_stride_b + i * prefix_stride_q, more, valid, origin, limit, ELSE_ALL
        )
        seen = first_hidden[:, None]
        limit = tl.maximum(tl.max(first_hidden, 0), origin)
        length = tl.cdiv(tl.cdiv(limit - origin, BLOCK_K), splits) * BLOCK_K
        # Values beyond may be uninitialised: a weight of zero times NaN is NaN.
        keys = limit
    begin = origin + split * length
    end = tl.minimum(begin + length, limit)
    # Rows beyond the last must not read the mask.
    i = tl.where(valid, i, queries)[:, None]
    k_first = kv_head * 0
    acc, row_sum, row_max = attend_keys(
        acc, row_sum, row_max, q_tile, k, v, mask, None, begin, end, i, k_first, batch, kv_head, None, queries, keys,
        seen, head_size, value_size, k_stride_s, v_stride_s, mask_stride_q, mask_stride_k, factor, softcap, slope, left,
        right, None, True, PREFIX, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, False, PRECISION, ROWS, BLOCK_K, WIDTH,
        VALUE_WIDTH, NO_PADDING, TMA, False, MASK != "none", ONE_MASK,
    )  # fmt: skip
    empty = row_sum == 0.0
    acc *= tl.where(empty, 0.0, 1.0 / row_sum)[:, None]
    lse2 = tl.where(empty, float("-inf"), row_max + tl.log2(row_sum))
    _store_or_combine(
        acc, lse2, kv_index, split, row, valid, group * queries, splits, value_size, out, lse, scratch, counters,
        ROWS, SPLITS, VALUE_WIDTH,
    )  # fmt: skip


@triton.jit
def _store_or_combine(
    acc: tl.tensor, lse2: tl.tensor, kv_index: tl.tensor, split: tl.tensor, row: tl.tensor, valid: tl.tensor,
    count: tl.tensor, splits: tl.tensor, value_size: tl.constexpr, out: tl.tensor, lse: tl.tensor,
    scratch: tl.tensor, counters: tl.tensor, ROWS: tl.constexpr, SPLITS: tl.constexpr, VALUE_WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Stores acc and lse2, L of each of `count` rows: of a single split to out and lse, else to scratch.

    The last of a key head's splits then combines them.
    """
    column = tl.arange(0, VALUE_WIDTH)[None, :]
    inside = valid[:, None] & (column < value_size)
    if SPLITS == 1:
        tl.store(out + column, rounded(acc, out.dtype.element_ty), mask=inside)
        tl.store(lse, lse2 * LN2, mask=valid)
    else:
        split_lse = scratch + tl.num_programs(0).to(tl.int64) * count * value_size
        own = (kv_index.to(tl.int64) * splits + split) * count + row
        tl.store(split_lse + own, lse2, mask=valid)
        tl.store(scratch + own[:, None] * value_size + column, acc, mask=inside)
        # The barrier makes the stores of all threads visible to the one whose atomic releases them.
        tl.debug_barrier()
        if tl.atomic_add(counters + kv_index, 1, sem="acq_rel") == splits - 1:
            first = kv_index.to(tl.int64) * splits * count + row
            _combine(scratch, split_lse, first, count, splits, value_size, out, lse, valid, ROWS, SPLITS, VALUE_WIDTH)
            tl.store(counters + kv_index, 0)


@triton.jit
def _combine(
    scratch: tl.tensor, split_lse: tl.tensor, first: tl.tensor, count: tl.tensor, splits: tl.tensor,
    value_size: tl.constexpr, out: tl.tensor, lse: tl.tensor, valid: tl.tensor,
    ROWS: tl.constexpr, SPLITS: tl.constexpr, VALUE_WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Stores out and lse. A row's splits are at `first`, `first` + count, … of `scratch` and `split_lse`."""
    split = tl.arange(0, SPLITS)[None, :]
    known = valid[:, None] & (split < splits)
    # Through L2: L1 does not see the stores of other multiprocessors.
    row_lse2 = tl.load(
        split_lse + first[:, None] + split * count, mask=known, other=float("-inf"), cache_modifier=".cg"
    )
    max_lse2 = tl.max(row_lse2, 1)
    base = tl.where(max_lse2 == float("-inf"), 0.0, max_lse2)
    row_sum = tl.sum(tl.exp2(row_lse2 - base[:, None]), 1)
    column = tl.arange(0, VALUE_WIDTH)[None, :]
    acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for start in range(0, splits, UNROLL):
        for n in tl.static_range(UNROLL):
            at = first + (start + n) * count
            read = valid & (start + n < splits)
            weight = tl.exp2(tl.load(split_lse + at, mask=read, other=float("-inf"), cache_modifier=".cg") - base)
            value = tl.load(
                scratch + at[:, None] * value_size + column, mask=read[:, None] & (column < value_size), other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            acc += weight[:, None] * value
    empty = row_sum == 0.0
    acc *= tl.where(empty, 0.0, 1.0 / row_sum)[:, None]
    tl.store(out + column, rounded(acc, out.dtype.element_ty), mask=valid[:, None] & (column < value_size))
    tl.store(lse, tl.where(empty, float("-inf"), (base + tl.log2(row_sum)) * LN2), mask=valid)
