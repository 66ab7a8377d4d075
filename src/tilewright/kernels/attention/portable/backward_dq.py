"""dQ of attention in Triton: the kernel of backward.py that loops over the keys of a block of queries."""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import rounded
from tilewright.kernels.attention.portable.backward import load_row_lse, probabilities
from tilewright.kernels.attention.portable.forward import key_range
from tilewright.kernels.attention.portable.tile import (
    dot_accumulate,
    dropout_mask,
    load_mask,
    load_rows,
    scores,
    sequence_bounds,
    store_rows,
)


@triton.jit
def _accumulate_dq(
    dq_tile: tl.tensor, q_tile: tl.tensor, dout_tile: tl.tensor, lse_high: tl.tensor, lse_low: tl.tensor,
    delta_tile: tl.tensor, k: tl.tensor, v: tl.tensor, mask: tl.tensor, state: tl.tensor, begin: tl.tensor,
    end: tl.tensor, first: tl.tensor, k_first: tl.tensor, batch: tl.tensor, kv_head: tl.tensor, dropout_row: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, head_size: tl.tensor, value_size: tl.tensor, k_stride_s: tl.tensor,
    v_stride_s: tl.tensor, mask_stride_q: tl.tensor, mask_stride_k: tl.tensor, factor: tl.tensor, softcap: tl.tensor,
    slope: tl.tensor, left: tl.tensor, right: tl.tensor, threshold: tl.tensor, dropout_scale: tl.tensor,
    EDGE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, NO_PADDING: tl.constexpr, TMA: tl.constexpr, NATURAL: tl.constexpr,
    ONLY_DELTA: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """(dQ / scale, Δ) of a block of queries, with the keys [begin, end) added to dQ or, where ONLY_DELTA, to Δ."""
    i = first + tl.arange(0, BLOCK_Q)[:, None]
    for start in tl.range(begin, end, BLOCK_K):
        k_tile = load_rows(
            k, batch, kv_head, k_first + start, k_first + keys, head_size, k_stride_s, BLOCK_K, WIDTH, NO_PADDING, TMA
        )
        s = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        j = start + tl.arange(0, BLOCK_K)[None, :]
        mask_tile = load_mask(mask, i, j, queries, keys, mask_stride_q, mask_stride_k, MASK, False)
        s, cap_slope = scores(
            s, i, j, queries, keys, factor, softcap, slope, mask_tile, left, right,
            EDGE, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, NATURAL,
        )  # fmt: skip
        p = probabilities(s, lse_high[:, None], lse_low[:, None], NATURAL)
        v_tile = load_rows(
            v, batch, kv_head, k_first + start, k_first + keys, value_size, v_stride_s, BLOCK_K, VALUE_WIDTH,
            NO_PADDING, TMA,
        )  # fmt: skip
        dp = tl.dot(dout_tile, tl.trans(v_tile), input_precision=PRECISION)
        if DROPOUT:
            dp = tl.where(dropout_mask(state, dropout_row, start, threshold, BLOCK_Q, BLOCK_K), dp * dropout_scale, 0.0)
        if ONLY_DELTA:
            delta_tile += tl.sum(p * dp, 1)
        else:
            ds = p * (dp - delta_tile[:, None])
            if SOFTCAP:
                ds *= cap_slope
            dq_tile = dot_accumulate(rounded(ds, k_tile.dtype), k_tile, dq_tile, PRECISION, NATURAL)
    return dq_tile, delta_tile


@triton.jit
def _loop_over_keys(
    dq_tile: tl.tensor, q_tile: tl.tensor, dout_tile: tl.tensor, lse_high: tl.tensor, lse_low: tl.tensor,
    delta_tile: tl.tensor, k: tl.tensor, v: tl.tensor, mask: tl.tensor, state: tl.tensor, first: tl.tensor,
    k_first: tl.tensor, batch: tl.tensor, kv_head: tl.tensor, dropout_row: tl.tensor, queries: tl.tensor,
    keys: tl.tensor, head_size: tl.tensor, value_size: tl.tensor, k_stride_s: tl.tensor, v_stride_s: tl.tensor,
    mask_stride_q: tl.tensor, mask_stride_k: tl.tensor, factor: tl.tensor, softcap: tl.tensor, slope: tl.tensor,
    left: tl.tensor, right: tl.tensor, threshold: tl.tensor, dropout_scale: tl.tensor, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, NO_PADDING: tl.constexpr, TMA: tl.constexpr, NATURAL: tl.constexpr,
    ONLY_DELTA: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """`_accumulate_dq` over all the keys that a block of queries sees."""
    bounds = key_range(first, queries, keys, left, right, BLOCK_Q, BLOCK_K, LEFT, RIGHT)
    for PART in tl.static_range(0 if LEFT else 1, 3):
        dq_tile, delta_tile = _accumulate_dq(
            dq_tile, q_tile, dout_tile, lse_high, lse_low, delta_tile, k, v, mask, state, bounds[PART],
            tl.minimum(bounds[1], bounds[3]) if PART == 0 else bounds[PART + 1], first, k_first, batch, kv_head,
            dropout_row, queries, keys, head_size, value_size, k_stride_s, v_stride_s, mask_stride_q, mask_stride_k,
            factor, softcap, slope, left, right, threshold, dropout_scale, PART != 1, LEFT, RIGHT, SOFTCAP, ALIBI, MASK,
            DROPOUT, PRECISION, BLOCK_Q, BLOCK_K, WIDTH, VALUE_WIDTH, NO_PADDING, TMA, NATURAL, ONLY_DELTA,
        )  # fmt: skip
    return dq_tile, delta_tile


@triton.jit(do_not_specialize=["left", "right", "threshold"])
def backward_dq(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, dout: tl.tensor, row_lse: tl.tensor, delta: tl.tensor,
    dlse: tl.tensor | None, dq: tl.tensor, mask: tl.tensor, slopes: tl.tensor, starts_q: tl.tensor, starts_k: tl.tensor,
    state: tl.tensor, heads: tl.tensor, group: tl.tensor, blocks: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    head_size: tl.constexpr, value_size: tl.constexpr, q_stride_b: tl.tensor, q_stride_h: tl.tensor,
    q_stride_s: tl.tensor, k_stride_b: tl.tensor, k_stride_h: tl.tensor, k_stride_s: tl.tensor, v_stride_b: tl.tensor,
    v_stride_h: tl.tensor, v_stride_s: tl.tensor, dout_stride_b: tl.tensor, dout_stride_h: tl.tensor,
    dout_stride_s: tl.tensor, dq_stride_b: tl.tensor, dq_stride_h: tl.tensor, dq_stride_s: tl.tensor,
    mask_stride_b: tl.tensor, mask_stride_h: tl.tensor, mask_stride_q: tl.tensor, mask_stride_k: tl.tensor,
    factor: tl.float32, scale: tl.float32, softcap: tl.float32, left: tl.int32, right: tl.int32, threshold: tl.int64,
    dropout_scale: tl.float32, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, DROPOUT: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, NO_PADDING: tl.constexpr, TMA: tl.constexpr,
    COMPUTES_DELTA: tl.constexpr,
) -> None:  # fmt: skip
    """Program (sequence · heads + head) · blocks + block of queries, as in `forward`: dq [batch, head, query, :].

    Where COMPUTES_DELTA, a first pass over the keys computes and stores delta, less dlse if there is one.
    """
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
        dout += batch64 * dout_stride_b + head.to(tl.int64) * dout_stride_h
    dq += batch64 * dq_stride_b + head.to(tl.int64) * dq_stride_h
    row_start = (batch64 * heads + head) * all_queries + q_first
    slope = 0.0
    if ALIBI:
        slope = tl.load(slopes + index * heads + head)
    if MASK != "none":
        mask += batch64 * mask_stride_b + head.to(tl.int64) * mask_stride_h
    q_tile = load_rows(
        q, batch, head, q_first + first, q_first + queries, head_size, q_stride_s, BLOCK_Q, WIDTH, NO_PADDING, TMA
    )
    dout_tile = load_rows(
        dout, batch, head, q_first + first, q_first + queries, value_size, dout_stride_s, BLOCK_Q, VALUE_WIDTH,
        NO_PADDING, TMA,
    )  # fmt: skip
    position = first + tl.arange(0, BLOCK_Q)
    lse_high, lse_low = load_row_lse(row_lse + row_start, position, queries)
    dropout_row = row_start + position
    NATURAL: tl.constexpr = row_lse.dtype.element_ty == tl.float64
    dq_tile = tl.zeros([BLOCK_Q, WIDTH], tl.float32)
    if COMPUTES_DELTA:
        delta_tile = tl.zeros([BLOCK_Q], tl.float32)
        _, delta_tile = _loop_over_keys(
            dq_tile, q_tile, dout_tile, lse_high, lse_low, delta_tile, k, v, mask, state, first, k_first, batch,
            kv_head, dropout_row, queries, keys, head_size, value_size, k_stride_s, v_stride_s, mask_stride_q,
            mask_stride_k, factor, softcap, slope, left, right, threshold, dropout_scale, LEFT, RIGHT, SOFTCAP, ALIBI,
            MASK, DROPOUT, PRECISION, BLOCK_Q, BLOCK_K, WIDTH, VALUE_WIDTH, NO_PADDING, TMA, NATURAL, True,
        )  # fmt: skip
        if dlse is not None:
            delta_tile -= tl.load(dlse + row_start + position, mask=position < queries, other=0.0)
        tl.store(delta + row_start + position, delta_tile, mask=position < queries)
    else:
        delta_tile = tl.load(delta + row_start + position, mask=position < queries, other=0.0)
    dq_tile, _ = _loop_over_keys(
        dq_tile, q_tile, dout_tile, lse_high, lse_low, delta_tile, k, v, mask, state, first, k_first, batch, kv_head,
        dropout_row, queries, keys, head_size, value_size, k_stride_s, v_stride_s, mask_stride_q, mask_stride_k, factor,
        softcap, slope, left, right, threshold, dropout_scale, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, DROPOUT, PRECISION,
        BLOCK_Q, BLOCK_K, WIDTH, VALUE_WIDTH, NO_PADDING, TMA, NATURAL, False,
    )  # fmt: skip
    store_rows(
        dq, dq_tile * scale, q_first + first, q_first + queries, head_size, dq_stride_s, BLOCK_Q, WIDTH, NO_PADDING
    )
