"""Attention of few queries against a long cache, split over the keys: limited by memory (Flash-Decoding, Dao 2023).

One program would read all the keys and values of a head while most of the GPU idles. Here `decode` gives every
part of the keys a program of its own, which takes all query heads that share them as the rows of one tile, so
that they are read once. It leaves O and the logarithm L of its sum; `combine` weighs the parts:

    L = log Σₚ exp(Lₚ)              O = Σₚ exp(Lₚ - L) · Oₚ
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.kernels.activation.formulas import rounded
from tilewright.kernels.attention.triton_tile import LN2, rows, scores


@triton.jit(do_not_specialize=["left", "right", "origin", "limit"])
def decode(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, part_out: tl.tensor, part_sum: tl.tensor, mask: tl.tensor,
    slopes: tl.tensor,
    heads: tl.tensor, group: tl.tensor, parts: tl.tensor, length: tl.tensor, origin: tl.tensor, limit: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, head_size: tl.constexpr, value_size: tl.constexpr,
    q_batch: tl.tensor, q_head: tl.tensor, q_place: tl.tensor, k_batch: tl.tensor, k_head: tl.tensor,
    k_place: tl.tensor, v_batch: tl.tensor, v_head: tl.tensor, v_place: tl.tensor, mask_batch: tl.tensor,
    mask_head: tl.tensor, mask_query: tl.tensor, mask_key: tl.tensor, factor: tl.float32, softcap: tl.float32,
    left: tl.int32, right: tl.int32,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, DESCRIBED: tl.constexpr,
) -> None:  # fmt: skip
    """Program (batch · key heads + key head) · parts + part: its keys, from origin + part · length on, for all queries.

    Row r of the tile is query r mod `queries` of the group's head r // queries. No query sees a key before
    `origin` or from `limit` on. part_out [batch · heads, query, part, :] and part_sum [batch · heads, query, part],
    fp32; 0 and -inf where no key of the part is seen. The rest is as in `forward`, `factor` with its sign.
    """
    part = tl.program_id(0) % parts
    kv_heads = heads // group
    kv_head = tl.program_id(0) // parts % kv_heads
    batch = tl.program_id(0) // parts // kv_heads
    wide_batch = batch.to(tl.int64)
    row = tl.arange(0, ROWS)
    head = kv_head * group + row // queries
    i = row % queries
    there = row < group * queries
    column = tl.arange(0, WIDTH)[None, :]
    at = q + wide_batch * q_batch + (head.to(tl.int64) * q_head + i * q_place)[:, None] + column
    q_tile = tl.load(at, mask=there[:, None] & (column < head_size), other=0.0)
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
    lane = ((wide_batch * heads + head) * queries + row % queries) * parts + part
    tl.store(part_sum + lane, tl.where(empty, float("-inf"), peak + tl.log2(mass)), mask=there)
    column = tl.arange(0, VALUE_WIDTH)[None, :]
    tl.store(part_out + lane[:, None] * value_size + column, acc, mask=there[:, None] & (column < value_size))


@triton.jit
def combine(
    part_out: tl.tensor, part_sum: tl.tensor, out: tl.tensor, lse: tl.tensor, heads: tl.tensor,
    queries: tl.tensor, parts: tl.tensor, value_size: tl.constexpr, out_batch: tl.tensor, out_head: tl.tensor,
    out_place: tl.tensor, PARTS: tl.constexpr, VALUE_WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """Program (batch · heads + head) · queries + query: out [batch, head, query, :] and lse from its `parts`."""
    lane = tl.program_id(0).to(tl.int64)
    query = lane % queries
    head = lane // queries % heads
    batch = lane // queries // heads
    part = tl.arange(0, PARTS)
    sums = tl.load(part_sum + lane * parts + part, mask=part < parts, other=float("-inf"))
    top = tl.max(sums, 0)
    empty = top == float("-inf")
    base = tl.where(empty, 0.0, top)
    mass = tl.sum(tl.exp2(sums - base), 0)
    column = tl.arange(0, VALUE_WIDTH)
    acc = tl.zeros([VALUE_WIDTH], tl.float32)
    for n in range(parts):
        weight = tl.exp2(tl.load(part_sum + lane * parts + n) - base)
        value = tl.load(part_out + (lane * parts + n) * value_size + column, mask=column < value_size, other=0.0)
        acc += weight * value
    acc *= tl.where(mass == 0.0, 0.0, 1.0 / mass)
    at = out + batch * out_batch + head * out_head + query * out_place + column
    tl.store(at, rounded(acc, out.dtype.element_ty), mask=column < value_size)
    total = tl.where(mass == 0.0, float("-inf"), (base + tl.log2(mass)) * LN2)
    tl.store(lse + lane, total)
