"""dQ of attention in Triton: the kernel of `backward.py` that walks over the keys of a block of queries."""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.kernels.activation.formulas import rounded
from tilewright.kernels.attention.portable.backward import levels, weights
from tilewright.kernels.attention.portable.forward import key_range
from tilewright.kernels.attention.portable.tile import kept, product, rows, scores, sequence, store_rows


@triton.jit
def _gather_queries(
    dq_tile: tl.tensor, q_tile: tl.tensor, do: tl.tensor, high: tl.tensor, rest: tl.tensor, less: tl.tensor,
    k: tl.tensor, v: tl.tensor, mask: tl.tensor, state: tl.tensor, begin: tl.tensor, end: tl.tensor, first: tl.tensor,
    k_first: tl.tensor, batch: tl.tensor, kv_head: tl.tensor, random_row: tl.tensor, queries: tl.tensor,
    keys: tl.tensor, head_size: tl.tensor, value_size: tl.tensor, k_place: tl.tensor, v_place: tl.tensor,
    mask_query: tl.tensor, mask_key: tl.tensor, factor: tl.tensor, softcap: tl.tensor, slope: tl.tensor,
    left: tl.tensor, right: tl.tensor, threshold: tl.tensor, kept_scale: tl.tensor,
    EDGE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    DESCRIBED: tl.constexpr, NATURAL: tl.constexpr, DELTA: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(dQ / scale, Δ) of a block of queries, with what the keys [begin, end) add to dQ or, where DELTA, to Δ."""
    i = first + tl.arange(0, BLOCK_Q)[:, None]
    for start in tl.range(begin, end, BLOCK_K):
        k_tile = rows(
            k, batch, kv_head, k_first + start, k_first + keys, head_size, k_place, BLOCK_K, WIDTH, WHOLE, DESCRIBED
        )
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        j = start + tl.arange(0, BLOCK_K)[None, :]
        s, bend = scores(
            s, i, j, queries, keys, factor, softcap, slope, mask, mask_query, mask_key, left, right,
            EDGE, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, NATURAL,
        )  # fmt: skip
        p = weights(s, high[:, None], rest[:, None], NATURAL)
        v_tile = rows(
            v, batch, kv_head, k_first + start, k_first + keys, value_size, v_place, BLOCK_K, VALUE_WIDTH, WHOLE,
            DESCRIBED,
        )  # fmt: skip
        dp = tl.dot(do, tl.trans(v_tile), input_precision=PRECISION)
        if DROPS:
            dp = tl.where(kept(state, random_row, start, threshold, BLOCK_Q, BLOCK_K), dp * kept_scale, 0.0)
        if DELTA:
            less += tl.sum(p * dp, 1)
        else:
            ds = p * (dp - less[:, None])
            if SOFTCAP:
                ds *= bend
            dq_tile = product(rounded(ds, k_tile.dtype), k_tile, dq_tile, PRECISION, NATURAL)
    return dq_tile, less


@triton.jit
def _over_keys(
    dq_tile: tl.tensor, q_tile: tl.tensor, do: tl.tensor, high: tl.tensor, rest: tl.tensor, less: tl.tensor,
    k: tl.tensor, v: tl.tensor, mask: tl.tensor, state: tl.tensor, first: tl.tensor, k_first: tl.tensor,
    batch: tl.tensor, kv_head: tl.tensor, random_row: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    head_size: tl.tensor, value_size: tl.tensor, k_place: tl.tensor, v_place: tl.tensor, mask_query: tl.tensor,
    mask_key: tl.tensor, factor: tl.tensor, softcap: tl.tensor, slope: tl.tensor, left: tl.tensor,
    right: tl.tensor, threshold: tl.tensor, kept_scale: tl.tensor,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, WHOLE: tl.constexpr, DESCRIBED: tl.constexpr,
    NATURAL: tl.constexpr, DELTA: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """`_gather_queries` over all the keys that a block of queries sees."""
    begin, all_begin, all_end, end = key_range(first, queries, keys, left, right, BLOCK_Q, BLOCK_K, LEFT, RIGHT)
    if LEFT:
        dq_tile, less = _gather_queries(
            dq_tile, q_tile, do, high, rest, less, k, v, mask, state, begin, tl.minimum(all_begin, end), first, k_first,
            batch, kv_head, random_row, queries, keys, head_size, value_size, k_place, v_place, mask_query, mask_key,
            factor, softcap, slope, left, right, threshold, kept_scale, True, LEFT, RIGHT, SOFTCAP, ALIBI, MASK,
            DROPS, PRECISION, BLOCK_Q, BLOCK_K, WIDTH, VALUE_WIDTH, WHOLE, DESCRIBED, NATURAL, DELTA,
        )  # fmt: skip
    dq_tile, less = _gather_queries(
        dq_tile, q_tile, do, high, rest, less, k, v, mask, state, all_begin, all_end, first, k_first, batch, kv_head,
        random_row, queries, keys, head_size, value_size, k_place, v_place, mask_query, mask_key, factor, softcap,
        slope, left, right, threshold, kept_scale, False, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, DROPS, PRECISION,
        BLOCK_Q, BLOCK_K, WIDTH, VALUE_WIDTH, WHOLE, DESCRIBED, NATURAL, DELTA,
    )  # fmt: skip
    dq_tile, less = _gather_queries(
        dq_tile, q_tile, do, high, rest, less, k, v, mask, state, all_end, end, first, k_first, batch, kv_head,
        random_row, queries, keys, head_size, value_size, k_place, v_place, mask_query, mask_key, factor, softcap,
        slope, left, right, threshold, kept_scale, True, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, DROPS, PRECISION,
        BLOCK_Q, BLOCK_K, WIDTH, VALUE_WIDTH, WHOLE, DESCRIBED, NATURAL, DELTA,
    )  # fmt: skip
    return dq_tile, less


@triton.jit(do_not_specialize=["left", "right", "threshold"])
def queries_only(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, dout: tl.tensor, level: tl.tensor, delta: tl.tensor,
    dlse: tl.tensor | None, dq: tl.tensor, mask: tl.tensor, slopes: tl.tensor,
    starts_q: tl.tensor, starts_k: tl.tensor, state: tl.tensor,
    heads: tl.tensor, group: tl.tensor, blocks: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    head_size: tl.constexpr, value_size: tl.constexpr,
    q_batch: tl.tensor, q_head: tl.tensor, q_place: tl.tensor, k_batch: tl.tensor, k_head: tl.tensor,
    k_place: tl.tensor, v_batch: tl.tensor, v_head: tl.tensor, v_place: tl.tensor, dout_batch: tl.tensor,
    dout_head: tl.tensor, dout_place: tl.tensor, dq_batch: tl.tensor, dq_head: tl.tensor, dq_place: tl.tensor,
    mask_batch: tl.tensor, mask_head: tl.tensor, mask_query: tl.tensor, mask_key: tl.tensor, factor: tl.float32,
    scale: tl.float32, softcap: tl.float32, left: tl.int32, right: tl.int32, threshold: tl.int64,
    kept_scale: tl.float32,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, DROPS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, DESCRIBED: tl.constexpr, OWN_DELTA: tl.constexpr,
) -> None:  # fmt: skip
    """Program (sequence · heads + head) · blocks + block of queries, as in `forward`: dq [batch, head, query, :].

    Where OWN_DELTA, delta is written too, less dlse if there is one.
    """
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
        dout += wide_batch * dout_batch + head.to(tl.int64) * dout_head
    dq += wide_batch * dq_batch + head.to(tl.int64) * dq_head
    lane = (wide_batch * heads + head) * total + q_first
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + index * heads + head)
    if MASK != "none":
        mask += wide_batch * mask_batch + head.to(tl.int64) * mask_head
    q_tile = rows(
        q, batch, head, q_first + first, q_first + queries, head_size, q_place, BLOCK_Q, WIDTH, WHOLE, DESCRIBED
    )
    do = rows(
        dout, batch, head, q_first + first, q_first + queries, value_size, dout_place, BLOCK_Q, VALUE_WIDTH, WHOLE,
        DESCRIBED,
    )  # fmt: skip
    place = first + tl.arange(0, BLOCK_Q)
    high, rest = levels(level + lane, place, queries)
    random_row = lane + place
    NATURAL: tl.constexpr = level.dtype.element_ty == tl.float64
    dq_tile = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    if OWN_DELTA:
        less = tl.zeros([BLOCK_Q], tl.float32)
        _, less = _over_keys(
            dq_tile, q_tile, do, high, rest, less, k, v, mask, state, first, k_first, batch, kv_head, random_row,
            queries, keys, head_size, value_size, k_place, v_place, mask_query, mask_key, factor, softcap, slope, left,
            right, threshold, kept_scale, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, DROPS, PRECISION, BLOCK_Q, BLOCK_K, WIDTH,
            VALUE_WIDTH, WHOLE, DESCRIBED, NATURAL, True,
        )  # fmt: skip
        if dlse is not None:
            less -= tl.load(dlse + lane + place, mask=place < queries, other=0.0)
        tl.store(delta + lane + place, less, mask=place < queries)
    else:
        less = tl.load(delta + lane + place, mask=place < queries, other=0.0)
    dq_tile, _ = _over_keys(
        dq_tile, q_tile, do, high, rest, less, k, v, mask, state, first, k_first, batch, kv_head, random_row, queries,
        keys, head_size, value_size, k_place, v_place, mask_query, mask_key, factor, softcap, slope, left, right,
        threshold, kept_scale, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, DROPS, PRECISION, BLOCK_Q, BLOCK_K, WIDTH,
        VALUE_WIDTH, WHOLE, DESCRIBED, NATURAL, False,
    )  # fmt: skip
    store_rows(dq, dq_tile * scale, q_first + first, q_first + queries, head_size, dq_place, BLOCK_Q, WIDTH, WHOLE)
