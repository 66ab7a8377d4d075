"""FlashAttention-2 backward in Triton, for any GPU (Dao, arXiv:2307.08691).

With L the log-sum-exp of the forward, O its result and dO the gradient of that,

    Δ  = rowsum(dO ∘ O)             P  = exp(S - L)              S = scores(Q Kᵀ), recomputed
    dV = Pᵀ dO                      dS = P ∘ (dO Vᵀ - Δ)         times the slope of the soft cap
    dK = scale · dSᵀ Q              dQ = scale · dS K

`backward_prepare` computes Δ and L · log₂ e (+inf where a query sees no key, so that its P is zero); `backward_dk_dv`
loops over the queries of a block of keys, with Sᵀ; `backward_dq` (backward_dq.py) over the keys of a block of queries.
No two programs add to one element, so gradients have the same bits in every run; seven products instead of five.
For fp32, and in 16 bits for few keys or queries, `backward_dq` sums Δ = rowsum(P ∘ dP) instead, since dP - Δ cancels.

Limit: the matrix units. On an H200 1.45 times FlashAttention-2 as PyTorch ships it (docs/experiments.md).
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.emit.triton_arithmetic import rounded
from tilewright.kernels.attention.portable.forward import key_range
from tilewright.kernels.attention.portable.tile import (
    LOG2E,
    dot_accumulate,
    dropout_mask,
    exponential,
    load_mask,
    load_rows,
    scores,
    sequence_bounds,
    store_rows,
)


@triton.jit(do_not_specialize=["queries"])
def backward_prepare(
    out: tl.tensor, dout: tl.tensor, lse: tl.tensor, dlse: tl.tensor | None, delta: tl.tensor, row_lse: tl.tensor,
    heads: tl.tensor, queries: tl.tensor, value_size: tl.constexpr, out_stride_b: tl.tensor, out_stride_h: tl.tensor,
    out_stride_s: tl.tensor, dout_stride_b: tl.tensor, dout_stride_h: tl.tensor, dout_stride_s: tl.tensor,
    ROWS: tl.constexpr, VALUE_WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """delta = rowsum(dout ∘ out) less dlse if there is one, row_lse = lse · log₂e: fp32 [batch, head, query].

    Program (batch · heads + head) · ⌈queries / ROWS⌉ + block.
    """
    blocks = tl.cdiv(queries, ROWS)
    first = tl.program_id(0) % blocks * ROWS
    index = (tl.program_id(0) // blocks).to(tl.int64)
    batch = index // heads
    head = index % heads
    out += batch * out_stride_b + head * out_stride_h
    dout += batch * dout_stride_b + head * dout_stride_h
    o = load_rows(out, 0, 0, first, queries, value_size, out_stride_s, ROWS, VALUE_WIDTH, False, False)
    dout_tile = load_rows(dout, 0, 0, first, queries, value_size, dout_stride_s, ROWS, VALUE_WIDTH, False, False)
    row = first + tl.arange(0, ROWS)
    inside = row < queries
    at = index * queries + row
    sums = tl.sum(o.to(tl.float32) * dout_tile.to(tl.float32), 1)
    if dlse is not None:
        sums -= tl.load(dlse + at, mask=inside, other=0.0)
    tl.store(delta + at, sums, mask=inside)
    total = tl.load(lse + at, mask=inside, other=0.0)
    tl.store(row_lse + at, tl.where(total == float("-inf"), float("inf"), total * LOG2E), mask=inside)


@triton.jit
def load_row_lse(row_lse: tl.tensor, position: tl.tensor, end: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """L of some queries as fp32 and its remainder, zero unless L is fp64; +inf past the last query: its P is zero."""
    whole = tl.load(row_lse + position, mask=position < end, other=float("inf"))
    lse_high = whole.to(tl.float32)
    lse_low = tl.where(lse_high == float("inf"), 0.0, whole - lse_high)
    return lse_high, lse_low.to(tl.float32)


@triton.jit
def probabilities(s: tl.tensor, lse_high: tl.tensor, lse_low: tl.tensor, NATURAL: tl.constexpr) -> tl.tensor:
    """P from scores and L in two parts, which broadcast to the scores."""
    return exponential((s - lse_high) - lse_low, NATURAL) if NATURAL else exponential(s - lse_high, NATURAL)


@triton.jit
def _accumulate_dk_dv(
    dk_tile: tl.tensor, dv_tile: tl.tensor, k_tile: tl.tensor, v_tile: tl.tensor, q: tl.tensor, dout: tl.tensor,
    row_lse: tl.tensor, delta: tl.tensor, mask: tl.tensor, state: tl.tensor, begin: tl.tensor, end: tl.tensor,
    first: tl.tensor, q_first: tl.tensor, batch: tl.tensor, head: tl.tensor, dropout_row: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, head_size: tl.tensor, value_size: tl.tensor, q_stride_s: tl.tensor,
    dout_stride_s: tl.tensor, mask_stride_q: tl.tensor, mask_stride_k: tl.tensor, factor: tl.tensor, softcap: tl.tensor,
    slope: tl.tensor, left: tl.tensor, right: tl.tensor, threshold: tl.tensor, dropout_scale: tl.tensor,
    EDGE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, NO_PADDING: tl.constexpr,
    TMA: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """dK / scale (where DK) and dV (where DV) of a block of keys, with the queries [begin, end) of a head added."""
    NATURAL: tl.constexpr = row_lse.dtype.element_ty == tl.float64
    j = first + tl.arange(0, BLOCK_K)[:, None]
    for start in tl.range(begin, end, BLOCK_Q):
        position = start + tl.arange(0, BLOCK_Q)
        q_tile = load_rows(
            q, batch, head, q_first + start, q_first + queries, head_size, q_stride_s, BLOCK_Q, WIDTH, NO_PADDING, TMA
        )
        lse_high, lse_low = load_row_lse(row_lse + q_first, position, queries)
        s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        i = position[None, :]
        mask_tile = load_mask(mask, i, j, queries, keys, mask_stride_q, mask_stride_k, MASK, False)
        s, cap_slope = scores(
            s, i, j, queries, keys, factor, softcap, slope, mask_tile, left, right, EDGE, LEFT,
            RIGHT, SOFTCAP, ALIBI, MASK, NATURAL,
        )  # fmt: skip
        p = probabilities(s, lse_high[None, :], lse_low[None, :], NATURAL)
        dout_tile = load_rows(
            dout, batch, head, q_first + start, q_first + queries, value_size, dout_stride_s, BLOCK_Q, VALUE_WIDTH,
            NO_PADDING, TMA,
        )  # fmt: skip
        keep = None
        if DROPOUT:
            keep = tl.trans(dropout_mask(state, dropout_row + start, first, threshold, BLOCK_Q, BLOCK_K))
        if DV:
            dropped = tl.where(keep, p, 0.0) if DROPOUT else p
            dv_tile = dot_accumulate(rounded(dropped, dout_tile.dtype), dout_tile, dv_tile, PRECISION, NATURAL)
        if DK:
            dp = tl.dot(v_tile, tl.trans(dout_tile), input_precision=PRECISION)
            delta_tile = tl.load(delta + q_first + position, mask=position < queries, other=0.0)
            if DROPOUT:
                dp = tl.where(keep, dp * dropout_scale, 0.0)
            ds = p * (dp - delta_tile[None, :])
            if SOFTCAP:
                ds *= cap_slope
            dk_tile = dot_accumulate(rounded(ds, q_tile.dtype), q_tile, dk_tile, PRECISION, NATURAL)
    return dk_tile, dv_tile


@triton.jit(do_not_specialize=["left", "right", "threshold"])
def backward_dk_dv(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, dout: tl.tensor, row_lse: tl.tensor, delta: tl.tensor, dk: tl.tensor,
    dv: tl.tensor, mask: tl.tensor, slopes: tl.tensor, starts_q: tl.tensor, starts_k: tl.tensor, state: tl.tensor,
    heads: tl.tensor, group: tl.tensor, blocks: tl.tensor, queries: tl.tensor, keys: tl.tensor, head_size: tl.constexpr,
    value_size: tl.constexpr, q_stride_b: tl.tensor, q_stride_h: tl.tensor, q_stride_s: tl.tensor,
    k_stride_b: tl.tensor, k_stride_h: tl.tensor, k_stride_s: tl.tensor, v_stride_b: tl.tensor, v_stride_h: tl.tensor,
    v_stride_s: tl.tensor, dout_stride_b: tl.tensor, dout_stride_h: tl.tensor, dout_stride_s: tl.tensor,
    dk_stride_b: tl.tensor, dk_stride_h: tl.tensor, dk_stride_s: tl.tensor, dv_stride_b: tl.tensor,
    dv_stride_h: tl.tensor, dv_stride_s: tl.tensor, mask_stride_b: tl.tensor, mask_stride_h: tl.tensor,
    mask_stride_q: tl.tensor, mask_stride_k: tl.tensor, factor: tl.float32, scale: tl.float32, softcap: tl.float32,
    left: tl.int32, right: tl.int32, threshold: tl.int64, dropout_scale: tl.float32, LEFT: tl.constexpr,
    RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr, DROPOUT: tl.constexpr,
    PACKED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, NO_PADDING: tl.constexpr, TMA: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
) -> None:  # fmt: skip
    """Program (sequence · key heads + key head) · blocks + block of keys: dk and dv [batch, key head, key, :].

    DK and DV say which of them; for the widest heads both do not fit into the registers. `factor` and `softcap` are
    those of `scores`; `scale` multiplies dk.
    """
    first = tl.program_id(0) % blocks * BLOCK_K
    kv_heads = heads // group
    kv_head = tl.program_id(0) // blocks % kv_heads
    index = tl.program_id(0) // blocks // kv_heads
    all_queries = queries
    batch, q_first, k_first, queries, keys = sequence_bounds(starts_q, starts_k, index, queries, keys, PACKED)
    if first >= keys:
        return
    batch64 = batch.to(tl.int64)
    if not TMA:
        k += batch64 * k_stride_b + kv_head.to(tl.int64) * k_stride_h
        v += batch64 * v_stride_b + kv_head.to(tl.int64) * v_stride_h
    k_tile = load_rows(
        k, batch, kv_head, k_first + first, k_first + keys, head_size, k_stride_s, BLOCK_K, WIDTH, NO_PADDING, TMA
    )
    v_tile = k_tile
    if DK:
        v_tile = load_rows(
            v, batch, kv_head, k_first + first, k_first + keys, value_size, v_stride_s, BLOCK_K, VALUE_WIDTH,
            NO_PADDING, TMA,
        )  # fmt: skip
    dk_tile = tl.zeros([BLOCK_K, WIDTH], tl.float32)
    dv_tile = tl.zeros([BLOCK_K, VALUE_WIDTH], tl.float32)
    # Queries and keys exchanged: the queries that see some of the block's keys.
    bounds = key_range(first, keys, queries, right, left, BLOCK_K, BLOCK_Q, RIGHT, LEFT)
    for member in range(group):
        head = kv_head * group + member
        row_start = (batch64 * heads + head) * all_queries
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + index * heads + head)
        q_at = q
        dout_at = dout
        if not TMA:
            q_at = q + batch64 * q_stride_b + head.to(tl.int64) * q_stride_h
            dout_at = dout + batch64 * dout_stride_b + head.to(tl.int64) * dout_stride_h
        mask_at = mask
        if MASK != "none":
            mask_at = mask + batch64 * mask_stride_b + head.to(tl.int64) * mask_stride_h
        dropout_row = row_start + q_first + tl.arange(0, BLOCK_Q)
        for PART in tl.static_range(0 if RIGHT else 1, 3 if LEFT else 2):
            part_end = bounds[3] if PART == 1 and not LEFT else bounds[PART + 1]
            dk_tile, dv_tile = _accumulate_dk_dv(
                dk_tile, dv_tile, k_tile, v_tile, q_at, dout_at, row_lse + row_start, delta + row_start, mask_at, state,
                bounds[PART], tl.minimum(part_end, bounds[3]), first, q_first, batch, head, dropout_row, queries, keys,
                head_size, value_size, q_stride_s, dout_stride_s, mask_stride_q, mask_stride_k, factor, softcap, slope,
                left, right, threshold, dropout_scale, PART != 1, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, DROPOUT, PRECISION,
                BLOCK_Q, BLOCK_K, WIDTH, VALUE_WIDTH, NO_PADDING, TMA, DK, DV,
            )  # fmt: skip
    end = k_first + keys
    if DK:
        dk += batch64 * dk_stride_b + kv_head.to(tl.int64) * dk_stride_h
        store_rows(dk, dk_tile * scale, k_first + first, end, head_size, dk_stride_s, BLOCK_K, WIDTH, NO_PADDING)
    if DV:
        dv += batch64 * dv_stride_b + kv_head.to(tl.int64) * dv_stride_h
        store_rows(
            dv, dv_tile * dropout_scale, k_first + first, end, value_size, dv_stride_s, BLOCK_K, VALUE_WIDTH, NO_PADDING
        )
