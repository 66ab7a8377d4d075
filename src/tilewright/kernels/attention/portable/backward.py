"""FlashAttention-2 backward in Triton, for any GPU: limited by the matrix units (Dao, arXiv:2307.08691).

With L the log-sum-exp of the forward, O its result and dO the gradient of that,

    Δ  = rowsum(dO ∘ O)             P  = exp(S - L)              S = scores(Q Kᵀ), drawn again
    dV = Pᵀ dO                      dS = P ∘ (dO Vᵀ - Δ)         times the slope of the soft cap
    dK = scale · dSᵀ Q              dQ = scale · dS K

Three kernels: `prepare` gives Δ and L · log₂e, with +inf where a query saw no key, so that its P is zero;
`keys_and_values` walks over the queries of a block of keys, in all heads that share it, and works with Sᵀ;
`queries_only` (`backward_queries.py`) walks over the keys of a block of queries. No two programs add to the
same element, so the gradients have the same bits in every run. P is computed twice: seven products instead of five.

Where one weight is nearly one, dP - Δ cancels, and the rounding of O is seen in Δ. fp32 bears none of that: the
forward has left L in fp64, taken off in two parts, and instead of `prepare`, `queries_only` runs first and sums
Δ = rowsum(P ∘ dP) from the very numbers that it is taken off from, in a pass of its own. So it does in 16 bits where
there are few keys or few queries, for then nothing else may be large beside that rounding.

On an H200, bf16, 16384 tokens, heads times size 2048, the three kernels together against FlashAttention-2's
backward as PyTorch ships it, by `tilewright bench attention --sweep portable`: 1.52 to 1.67 times as fast for d 64,
1.43 to 1.79 for d 128, 1.17 to 1.30 for d 256; geometric mean of twelve 1.45. Lost at d 64, S 4096, full, for dk and
dv: 64 x 128 in eight warps 3074 us and 128 x 128 in eight 2779, where 128 x 64 (queries x keys) in four takes 2012.
d 256 with dk and dv together spills 720 bytes a thread and is at 0.80 to 0.97; so they are computed apart there, which
repeats one product. There dv with one stage takes 1462 us at S 4096, full, with two 1038.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

import triton
import triton.language as tl

from tilewright.kernels.activation.formulas import rounded
from tilewright.kernels.attention.portable.tile import LOG2E, kept, power, product, rows, scores, sequence, store_rows


@triton.jit(do_not_specialize=["queries"])
def prepare(
    out: tl.tensor, dout: tl.tensor, lse: tl.tensor, dlse: tl.tensor | None, delta: tl.tensor, level: tl.tensor,
    heads: tl.tensor, queries: tl.tensor, value_size: tl.constexpr, out_batch: tl.tensor, out_head: tl.tensor,
    out_place: tl.tensor, dout_batch: tl.tensor, dout_head: tl.tensor, dout_place: tl.tensor,
    ROWS: tl.constexpr, VALUE_WIDTH: tl.constexpr,
) -> None:  # fmt: skip
    """delta = rowsum(dout ∘ out) less dlse if there is one, level = lse · log₂e: fp32 [batch, head, query].

    Program (batch · heads + head) · ⌈queries / ROWS⌉ + block.
    """
    blocks = tl.cdiv(queries, ROWS)
    first = tl.program_id(0) % blocks * ROWS
    index = (tl.program_id(0) // blocks).to(tl.int64)
    batch = index // heads
    head = index % heads
    out += batch * out_batch + head * out_head
    dout += batch * dout_batch + head * dout_head
    o = rows(out, 0, 0, first, queries, value_size, out_place, ROWS, VALUE_WIDTH, False, False)
    do = rows(dout, 0, 0, first, queries, value_size, dout_place, ROWS, VALUE_WIDTH, False, False)
    row = first + tl.arange(0, ROWS)
    inside = row < queries
    at = index * queries + row
    sums = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    if dlse is not None:
        sums -= tl.load(dlse + at, mask=inside, other=0.0)
    tl.store(delta + at, sums, mask=inside)
    total = tl.load(lse + at, mask=inside, other=0.0)
    tl.store(level + at, tl.where(total == float("-inf"), float("inf"), total * LOG2E), mask=inside)


@triton.jit
def levels(level: tl.tensor, place: tl.tensor, end: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """L of some queries in two parts, the second zero unless L is kept in fp64; +inf where there is no query,
    which makes its P zero."""
    whole = tl.load(level + place, mask=place < end, other=float("inf"))
    high = whole.to(tl.float32)
    rest = tl.where(high == float("inf"), 0.0, whole - high)
    return high, rest.to(tl.float32)


@triton.jit
def weights(s: tl.tensor, high: tl.tensor, rest: tl.tensor, NATURAL: tl.constexpr) -> tl.tensor:
    """P of scores and their L in two parts, with one axis more than the queries have."""
    return power((s - high) - rest, NATURAL) if NATURAL else power(s - high, NATURAL)


@triton.jit
def _query_range(
    first: tl.tensor, queries: tl.tensor, keys: tl.tensor, left: tl.tensor, right: tl.tensor,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:  # fmt: skip
    """Of keys [first, first + BLOCK_K): the same as `key_range` of a block of queries, from the other side."""
    shift = keys - queries
    last = tl.minimum(first + BLOCK_K, keys) - 1
    begin = queries * 0
    end = queries
    all_begin = queries * 0
    all_end = queries
    if RIGHT:
        begin = tl.maximum(first - shift - right, 0) // BLOCK_Q * BLOCK_Q
        all_begin = tl.cdiv(tl.maximum(last - shift - right, 0), BLOCK_Q) * BLOCK_Q
    if LEFT:
        end = tl.maximum(tl.minimum(queries, last - shift + left + 1), 0)
        all_end = tl.maximum(tl.minimum(queries, first - shift + left + 1), 0) // BLOCK_Q * BLOCK_Q
    all_begin = tl.minimum(all_begin, tl.cdiv(end, BLOCK_Q) * BLOCK_Q)
    all_end = tl.maximum(all_end, all_begin)
    return begin, all_begin, all_end, end


@triton.jit
def _gather_keys(
    dk_tile: tl.tensor, dv_tile: tl.tensor, k_tile: tl.tensor, v_tile: tl.tensor, q: tl.tensor, dout: tl.tensor,
    level: tl.tensor, delta: tl.tensor, mask: tl.tensor, state: tl.tensor, begin: tl.tensor, end: tl.tensor,
    first: tl.tensor, q_first: tl.tensor, batch: tl.tensor, head: tl.tensor, random_row: tl.tensor,
    queries: tl.tensor, keys: tl.tensor, head_size: tl.tensor, value_size: tl.tensor, q_place: tl.tensor,
    dout_place: tl.tensor, mask_query: tl.tensor, mask_key: tl.tensor, factor: tl.tensor, softcap: tl.tensor,
    slope: tl.tensor, left: tl.tensor, right: tl.tensor, threshold: tl.tensor, kept_scale: tl.tensor,
    EDGE: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    DESCRIBED: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """dK / scale where DK and dV where DV of a block of keys, with what the queries [begin, end) of a head add."""
    NATURAL: tl.constexpr = level.dtype.element_ty == tl.float64
    j = first + tl.arange(0, BLOCK_K)[:, None]
    for start in tl.range(begin, end, BLOCK_Q):
        place = start + tl.arange(0, BLOCK_Q)
        q_tile = rows(
            q, batch, head, q_first + start, q_first + queries, head_size, q_place, BLOCK_Q, WIDTH, WHOLE, DESCRIBED
        )
        high, rest = levels(level + q_first, place, queries)
        s = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        s, bend = scores(
            s, place[None, :], j, queries, keys, factor, softcap, slope, mask, mask_query, mask_key, left, right,
            EDGE, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, NATURAL,
        )  # fmt: skip
        p = weights(s, high[None, :], rest[None, :], NATURAL)
        do = rows(
            dout, batch, head, q_first + start, q_first + queries, value_size, dout_place, BLOCK_Q, VALUE_WIDTH, WHOLE,
            DESCRIBED,
        )  # fmt: skip
        keep = None
        if DROPS:
            keep = tl.trans(kept(state, random_row + start, first, threshold, BLOCK_Q, BLOCK_K))
        if DV:
            thinned = tl.where(keep, p, 0.0) if DROPS else p
            dv_tile = product(rounded(thinned, do.dtype), do, dv_tile, PRECISION, NATURAL)
        if DK:
            dp = tl.dot(v_tile, tl.trans(do), input_precision=PRECISION)
            less = tl.load(delta + q_first + place, mask=place < queries, other=0.0)
            if DROPS:
                dp = tl.where(keep, dp * kept_scale, 0.0)
            ds = p * (dp - less[None, :])
            if SOFTCAP:
                ds *= bend
            dk_tile = product(rounded(ds, q_tile.dtype), q_tile, dk_tile, PRECISION, NATURAL)
    return dk_tile, dv_tile


@triton.jit
def _over_queries(
    dk_tile: tl.tensor, dv_tile: tl.tensor, k_tile: tl.tensor, v_tile: tl.tensor, q: tl.tensor, dout: tl.tensor,
    level: tl.tensor, delta: tl.tensor, mask: tl.tensor, state: tl.tensor, first: tl.tensor, q_first: tl.tensor,
    batch: tl.tensor, head: tl.tensor, random_row: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    head_size: tl.tensor, value_size: tl.tensor, q_place: tl.tensor, dout_place: tl.tensor, mask_query: tl.tensor,
    mask_key: tl.tensor, factor: tl.tensor, softcap: tl.tensor, slope: tl.tensor, left: tl.tensor,
    right: tl.tensor, threshold: tl.tensor, kept_scale: tl.tensor,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, MASK: tl.constexpr,
    DROPS: tl.constexpr, PRECISION: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, WHOLE: tl.constexpr, DESCRIBED: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """`_gather_keys` over all the queries of a head that see a block of keys."""
    begin, all_begin, all_end, end = _query_range(first, queries, keys, left, right, BLOCK_Q, BLOCK_K, LEFT, RIGHT)
    if RIGHT:
        dk_tile, dv_tile = _gather_keys(
            dk_tile, dv_tile, k_tile, v_tile, q, dout, level, delta, mask, state, begin, tl.minimum(all_begin, end),
            first, q_first, batch, head, random_row, queries, keys, head_size, value_size, q_place, dout_place,
            mask_query, mask_key, factor, softcap, slope, left, right, threshold, kept_scale, True, LEFT, RIGHT,
            SOFTCAP, ALIBI, MASK, DROPS, PRECISION, BLOCK_Q, BLOCK_K, WIDTH, VALUE_WIDTH, WHOLE, DESCRIBED, DK, DV,
        )  # fmt: skip
    dk_tile, dv_tile = _gather_keys(
        dk_tile, dv_tile, k_tile, v_tile, q, dout, level, delta, mask, state, all_begin, all_end, first,
        q_first, batch, head, random_row, queries, keys, head_size, value_size, q_place, dout_place, mask_query,
        mask_key, factor, softcap, slope, left, right, threshold, kept_scale, False, LEFT, RIGHT, SOFTCAP, ALIBI,
        MASK, DROPS, PRECISION, BLOCK_Q, BLOCK_K, WIDTH, VALUE_WIDTH, WHOLE, DESCRIBED, DK, DV,
    )  # fmt: skip
    if LEFT:
        dk_tile, dv_tile = _gather_keys(
            dk_tile, dv_tile, k_tile, v_tile, q, dout, level, delta, mask, state, all_end, end, first,
            q_first, batch, head, random_row, queries, keys, head_size, value_size, q_place, dout_place, mask_query,
            mask_key, factor, softcap, slope, left, right, threshold, kept_scale, True, LEFT, RIGHT, SOFTCAP, ALIBI,
            MASK, DROPS, PRECISION, BLOCK_Q, BLOCK_K, WIDTH, VALUE_WIDTH, WHOLE, DESCRIBED, DK, DV,
        )  # fmt: skip
    return dk_tile, dv_tile


@triton.jit(do_not_specialize=["left", "right", "threshold"])
def keys_and_values(
    q: tl.tensor, k: tl.tensor, v: tl.tensor, dout: tl.tensor, level: tl.tensor, delta: tl.tensor,
    dk: tl.tensor, dv: tl.tensor, mask: tl.tensor, slopes: tl.tensor,
    starts_q: tl.tensor, starts_k: tl.tensor, state: tl.tensor,
    heads: tl.tensor, group: tl.tensor, blocks: tl.tensor, queries: tl.tensor, keys: tl.tensor,
    head_size: tl.constexpr, value_size: tl.constexpr,
    q_batch: tl.tensor, q_head: tl.tensor, q_place: tl.tensor, k_batch: tl.tensor, k_head: tl.tensor,
    k_place: tl.tensor, v_batch: tl.tensor, v_head: tl.tensor, v_place: tl.tensor, dout_batch: tl.tensor,
    dout_head: tl.tensor, dout_place: tl.tensor, dk_batch: tl.tensor, dk_head: tl.tensor, dk_place: tl.tensor,
    dv_batch: tl.tensor, dv_head: tl.tensor, dv_place: tl.tensor, mask_batch: tl.tensor, mask_head: tl.tensor,
    mask_query: tl.tensor, mask_key: tl.tensor, factor: tl.float32, scale: tl.float32, softcap: tl.float32,
    left: tl.int32, right: tl.int32, threshold: tl.int64, kept_scale: tl.float32,
    LEFT: tl.constexpr, RIGHT: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr,
    MASK: tl.constexpr, DROPS: tl.constexpr, PACKED: tl.constexpr, PRECISION: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    WHOLE: tl.constexpr, DESCRIBED: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr,
) -> None:  # fmt: skip
    """Program (sequence · key heads + key head) · blocks + block of keys: dk and dv [batch, key head, key, :].

    Each where DK and DV say so: for the widest heads both together do not fit into the registers.

    `factor` and `softcap` are those of `scores`; `scale` multiplies dk.
    """
    first = tl.program_id(0) % blocks * BLOCK_K
    kv_heads = heads // group
    kv_head = tl.program_id(0) // blocks % kv_heads
    index = tl.program_id(0) // blocks // kv_heads
    total = queries
    batch, q_first, k_first, queries, keys = sequence(starts_q, starts_k, index, queries, keys, PACKED)
    if first >= keys:
        return
    wide_batch = batch.to(tl.int64)
    if not DESCRIBED:
        k += wide_batch * k_batch + kv_head.to(tl.int64) * k_head
        v += wide_batch * v_batch + kv_head.to(tl.int64) * v_head
    k_tile = rows(
        k, batch, kv_head, k_first + first, k_first + keys, head_size, k_place, BLOCK_K, WIDTH, WHOLE, DESCRIBED
    )
    v_tile = k_tile
    if DK:
        v_tile = rows(
            v, batch, kv_head, k_first + first, k_first + keys, value_size, v_place, BLOCK_K, VALUE_WIDTH, WHOLE,
            DESCRIBED,
        )  # fmt: skip
    dk_tile = tl.zeros([BLOCK_K, WIDTH], tl.float32)
    dv_tile = tl.zeros([BLOCK_K, VALUE_WIDTH], tl.float32)
    for member in range(group):
        head = kv_head * group + member
        lane = (wide_batch * heads + head) * total
        slope = 0.0
        if ALIBI:
            slope = tl.load(slopes + index * heads + head)
        q_at = q
        dout_at = dout
        if not DESCRIBED:
            q_at = q + wide_batch * q_batch + head.to(tl.int64) * q_head
            dout_at = dout + wide_batch * dout_batch + head.to(tl.int64) * dout_head
        mask_at = mask
        if MASK != "none":
            mask_at = mask + wide_batch * mask_batch + head.to(tl.int64) * mask_head
        random_row = lane + q_first + tl.arange(0, BLOCK_Q)
        dk_tile, dv_tile = _over_queries(
            dk_tile, dv_tile, k_tile, v_tile, q_at, dout_at, level + lane, delta + lane, mask_at, state, first, q_first,
            batch, head, random_row, queries, keys, head_size, value_size, q_place, dout_place, mask_query, mask_key,
            factor, softcap, slope, left, right, threshold, kept_scale, LEFT, RIGHT, SOFTCAP, ALIBI, MASK, DROPS,
            PRECISION, BLOCK_Q, BLOCK_K, WIDTH, VALUE_WIDTH, WHOLE, DESCRIBED, DK, DV,
        )  # fmt: skip
    end = k_first + keys
    if DK:
        dk += wide_batch * dk_batch + kv_head.to(tl.int64) * dk_head
        store_rows(dk, dk_tile * scale, k_first + first, end, head_size, dk_place, BLOCK_K, WIDTH, WHOLE)
    if DV:
        dv += wide_batch * dv_batch + kv_head.to(tl.int64) * dv_head
        store_rows(dv, dv_tile * kept_scale, k_first + first, end, value_size, dv_place, BLOCK_K, VALUE_WIDTH, WHOLE)
