"""Attention of few queries against a long cache, split over the keys: limited by memory (Flash-Decoding, Dao 2023).

One program would read all the keys and values of a head while most of the GPU idles. Here `decode` gives every
part of the keys a program of its own, which takes all query heads that share them as the rows of one tile, so
that they are read once. Each leaves O and the logarithm L of its sum; the last to arrive weighs the parts:

    L = log Σₚ exp(Lₚ)              O = Σₚ exp(Lₚ - L) · Oₚ

On an H200, bf16, 64 heads of 128 on 8 of k and v, shares of the copy bandwidth: 0.97 to 1.08 for caches of 1 GB and
more, 0.69 (46 us) for 134 MB. There `cuda.cu` takes what it can of such calls. Lost at 134 MB: a second kernel
that joins (49 us), bulk copies (47, and their tensor maps cost the host), four stages (47), blocks of 128 keys (48).
Tiles loaded into registers a step ahead, to be evicted first, take 44 us, but with 32768 keys 271 where this takes 254.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.kernels.activation.formulas import rounded
from tilewright.kernels.attention.portable.tile import LN2, rows, scores

AT_ONCE = tl.constexpr(4)
"""Parts whose loads are on their way together while parts are joined."""


@triton.jit(do_not_specialize=["left", "right", "origin", "limit"])
def decode(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, out: tl.tensor, lse: tl.tensor, scratch: tl.tensor, arrived: tl.tensor,
    mask: tl.tensor, slopes: tl.tensor,
    heads: tl.tensor, group: tl.tensor, parts: tl.tensor, length: tl.tensor, origin: tl.tensor, limit: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, head_size: tl.constexpr, value_size: tl.constexpr,
    q_batch: tl.tensor, q_head: tl.tensor, q_place: tl.tensor, k_batch: tl.tensor, k_head: tl.tensor,
    k_place: tl.tensor, v_batch: tl.tensor, v_head: tl.tensor, v_place: tl.tensor, out_batch: tl.tensor,
    out_head: tl.tensor, out_place: tl.tensor, mask_batch: tl.tensor, mask_head: tl.tensor, mask_query: tl.tensor,
    mask_key: tl.tensor, factor: tl.float32, softcap: tl.float32, left: tl.int32, right: tl.int32,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, DESCRIBED: tl.constexpr, PARTS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (batch · key heads + key head) · parts + part: its keys, from origin + part · length on, for all queries.

    Row r of the tile is query r mod `queries` of the group's head r // queries. No query sees a key before
    `origin` or from `limit` on. PARTS is `parts`, padded to a power of two. Where there are several,
    scratch, fp32, holds O of each [program, row, :], then L of each [program, row], 0 and -inf where no key of a
    part is seen; and arrived, int32 [batch · key heads], is zero before and after. The rest is as in `forward`,
    `factor` with its sign.
    """
    part = tl.program_id(0) % parts
    lane = tl.program_id(0) // parts
    kv_heads = heads // group
    kv_head = lane % kv_heads
    batch = lane // kv_heads
    wide_batch = batch.to(tl.int64)
    row = tl.arange(0, ROWS)
    head = kv_head * group + row // queries
    i = row % queries
    there = row < group * queries
    column = tl.arange(0, WIDTH)[None, :]
    at = q + wide_batch * q_batch + (head.to(tl.int64) * q_head + i * q_place)[:, None] + column
    q_tile = tl.load(at, mask=there[:, None] & (column < head_size), other=0.0)
    out += wide_batch * out_batch + (head.to(tl.int64) * out_head + i * out_place)[:, None]
    lse += (wide_batch * heads + head) * queries + i
    if not DESCRIBED:
        k += wide_batch * k_batch + kv_head.to(tl.int64) * k_head
        v += wide_batch * v_batch + kv_head.to(tl.int64) * v_head
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + batch * heads + head, mask=there, other=0.0)[:, None]
    if MASK != "none":
        mask = mask + wide_batch * mask_batch + (head.to(tl.int64) * mask_head)[:, None]
    acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    begin = origin + part * length
    end = tl.minimum(begin + length, limit)
    # Rows that do not exist must not reach into the mask.
    i = tl.where(there, i, queries)[:, None]
    for step in tl.range(0, tl.cdiv(end - begin, BLOCK_K)):
        start = begin + step * BLOCK_K
        k_tile = rows(k, batch, kv_head, start, keys, head_size, k_place, BLOCK_K, WIDTH, WHOLE, DESCRIBED)
        s = tl.dot(q_tile.to(k_tile.dtype), tl.trans(k_tile), input_precision=PRECISION)
        j = start + tl.arange(0, BLOCK_K)[None, :]
        s, _ = scores(
            s, i, j, queries, keys, factor, softcap, slope, mask, mask_query, mask_key, left, right,
            True, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, False,
        )  # fmt: skip
        new = tl.maximum(peak, tl.max(s, 1))
        base = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp2(s - base[:, None])
        decay = tl.exp2(peak - base)
        mass = mass * decay + tl.sum(p, 1)
        v_tile = rows(v, batch, kv_head, start, keys, value_size, v_place, BLOCK_K, VALUE_WIDTH, WHOLE, DESCRIBED)
        acc = tl.dot(rounded(p, v_tile.dtype), v_tile, acc * decay[:, None], input_precision=PRECISION)
        peak = new
    empty = mass == 0.0
    acc *= tl.where(empty, 0.0, 1.0 / mass)[:, None]
    total = tl.where(empty, float("-inf"), peak + tl.log2(mass))
    _leave(
        acc, total, lane, part, row, there, group * queries, parts, value_size, out, lse, scratch, arrived,
        ROWS, PARTS, VALUE_WIDTH,
    )  # fmt: skip


@triton.jit
def _leave(
    acc: tl.tensor, total: tl.tensor, lane: tl.tensor, part: tl.tensor, row: tl.tensor, there: tl.tensor,
    count: tl.tensor, parts: tl.tensor, value_size: tl.constexpr, out: tl.tensor, lse: tl.tensor,
    scratch: tl.tensor, arrived: tl.tensor, ROWS: tl.constexpr, PARTS: tl.constexpr, VALUE_WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """acc and total, L of each of `count` rows, to out and lse; or to scratch, which the last to arrive joins."""
    column = tl.arange(0, VALUE_WIDTH)[None, :]
    inside = there[:, None] & (column < value_size)
    if PARTS == 1:
        tl.store(out + column, rounded(acc, out.dtype.element_ty), mask=inside)
        tl.store(lse, total * LN2, mask=there)
    else:
        sums = scratch + tl.num_programs(0).to(tl.int64) * count * value_size
        own = (lane.to(tl.int64) * parts + part) * count + row
        tl.store(sums + own, total, mask=there)
        tl.store(scratch + own[:, None] * value_size + column, acc, mask=inside)
        # The addition releases what its thread knows of, and that is all once the others have met it here.
        tl.debug_barrier()
        if tl.atomic_add(arrived + lane, 1, sem="acq_rel") == parts - 1:
            first = lane.to(tl.int64) * parts * count + row
            _join(scratch, sums, first, count, parts, value_size, out, lse, there, ROWS, PARTS, VALUE_WIDTH)
            tl.store(arrived + lane, 0)


@triton.jit
def _join(
    scratch: tl.tensor, sums: tl.tensor, first: tl.tensor, count: tl.tensor, parts: tl.tensor,
    value_size: tl.constexpr, out: tl.tensor, lse: tl.tensor, there: tl.tensor,
    ROWS: tl.constexpr, PARTS: tl.constexpr, VALUE_WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """out and lse of the rows whose first part is row `first` of `scratch` and `sums`, the next `count` further."""
    part = tl.arange(0, PARTS)[None, :]
    known = there[:, None] & (part < parts)
    # Past the first level of cache, where no other multiprocessor's stores arrive.
    parted = tl.load(sums + first[:, None] + part * count, mask=known, other=float("-inf"), cache_modifier=".cg")
    top = tl.max(parted, 1)
    base = tl.where(top == float("-inf"), 0.0, top)
    mass = tl.sum(tl.exp2(parted - base[:, None]), 1)
    column = tl.arange(0, VALUE_WIDTH)[None, :]
    acc = tl.zeros([ROWS, VALUE_WIDTH], tl.float32)
    for start in range(0, parts, AT_ONCE):
        for n in tl.static_range(AT_ONCE):
            at = first + (start + n) * count
            read = there & (start + n < parts)
            weight = tl.exp2(tl.load(sums + at, mask=read, other=float("-inf"), cache_modifier=".cg") - base)
            value = tl.load(
                scratch + at[:, None] * value_size + column, mask=read[:, None] & (column < value_size), other=0.0,
                cache_modifier=".cg",
            )  # fmt: skip
            acc += weight[:, None] * value
    empty = mass == 0.0
    acc *= tl.where(empty, 0.0, 1.0 / mass)[:, None]
    tl.store(out + column, rounded(acc, out.dtype.element_ty), mask=there[:, None] & (column < value_size))
    tl.store(lse, tl.where(empty, float("-inf"), (base + tl.log2(mass)) * LN2), mask=there)
