"""FlashAttention forward in Gluon for Hopper (Dao et al., arXiv:2205.14135; Shah et al., arXiv:2407.08608).

A program owns tiles: 64, 128 or 192 queries of one head, against all keys that they see. Its warps:

    produce    one warp; bulk tensor copies of Q, and of blocks of K and V into two rings of two slots
    consume    one to three warpgroups of 64 queries each. Q Kᵀ of a block is issued together with P V of the
               block before, so that softmax runs beside the tensor cores; P stays in registers; the warpgroups
               take turns in issuing. The last block of keys comes first: where places and blocks align it alone
               needs a mask, and on the diagonal the upper 64 queries multiply half of it.

Limit: to head size 64 the exponentials (as many cycles as the products) and instruction issue, above it the
tensor cores under the power cap. H200, bf16, 16384 tokens, heads x head size = 2048, medians of 24 interleaved
launches with a cold L2, TFLOP/s (of cuDNN in the same run; causal counts half):

             S512        1024        2048        4096        8192        16384
    64       401 (1.04)  455 (1.05)  520 (1.14)  522 (1.15)  550 (1.20)  548 (1.19)
      causal 244 (0.94)  333 (1.00)  406 (1.03)  468 (1.10)  523 (1.19)  541 (1.20)
    128      551 (1.05)  640 (1.05)  691 (1.06)  684 (1.06)  656 (1.04)  650 (1.05)
      causal 335 (1.00)  472 (1.09)  553 (1.14)  623 (1.14)  623 (1.15)  628 (1.14)
    256      531 (1.03)  642 (1.02)  707 (1.02)  713 (1.06)  715 (1.06)  718 (1.06)
      causal 321 (0.95)  471 (1.04)  598 (1.10)  666 (1.17)  689 (1.21)  704 (1.21)

Beside its products a tile of head size 128 takes about 1.8 µs (full, 512 against 4096 keys), as 150 keys would.

Where few short tiles leave multiprocessors idle, one warpgroup a program and two programs a multiprocessor. H200, bf16,
16 heads, causal, µs in place of those with two warpgroups (cuDNN in the same run):

             S128 B1    S128 B4     S256 B1     S256 B4      S512 B1      S512 B2
    64       7.2 (8.5)  8.2 (9.7)   8.5 (9.9)   11.0 (12.5)  11.1 (12.8)  13.3 (14.3)
      cuDNN  8.4        9.0         9.7         11.1         12.1         13.1
    128      8.1 (9.3)  10.0 (10.5) 10.7 (10.7) 13.5 (15.1)  13.6 (14.7)  16.5 (18.0)
      cuDNN  9.5        10.8        12.6        14.1         15.2         16.6

Tried and lost, of cuDNN unless another is named:
  - head size 256, blocks of 128 keys in chunks of 64 columns through one ring of ten slots, the scores of a block
    only after the product of the one before (both at once fit no registers: ptxas serialises them), two versions:
    0.92 to 0.97 full, 0.85 to 1.18 causal; with eight slots 0.88 full; without turns 0.96 to 0.99 full
  - head size 64, three warpgroups at 512 and 1024 causal: 0.74 to 0.84; two at 4096 full: 0.96 to 0.99
  - three warpgroups without turns: 0.91 of those with at 512 full, elsewhere 0.97 to 1.02
  - the wait for P V held behind the softmax (`late`) with three warpgroups: 0.98 of without full, 0.89 to 0.97
    causal; with two and head size 64 it is without that loses when causal, 0.68 to 0.93; full, with loses 1 to 3 %
  - the diagonal's block in full: 0.97 to 0.99 of halving it (128), 0.90 to 1.00 (64)
  - one warpgroup a program beyond what is there at once, S512 B4: 19.6 µs in place of 17.1 (64), 25.3 of 22.3 (128)
  - a tile looked up only when the one before is done, Q fetched before K: 0.92 in place of 0.96 (128, causal, 512)
"""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from tilewright.kernels.attention.hopper.softmax import (
    element,
    first_keys,
    inverse,
    mma_layout,
    opened,
    rounded,
    row_sums,
    softened,
    store_lse,
)
from tilewright.kernels.attention.hopper.walk import (
    ROWS,
    Problem,
    barriers,
    key_blocks,
    own_tiles,
    pass_turn,
    release,
    ring_of,
    take_turn,
    tile_at,
    wait_empty,
    wait_full,
)


@gluon.jit
def fetch(descriptor, batch, head, row, ring, place, STAGES: gl.constexpr):
    """Issue the copy of a block of K or V into its slot, once that is free."""
    wait_empty(ring, place, STAGES)
    slot = place % STAGES
    mbarrier.expect(ring.full.index(slot), descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, [batch, head, row, 0], ring.full.index(slot), ring.slots.index(slot))


@gluon.jit
def produce(q, k, v, q_ring, k_ring, v_ring, p, TILES: gl.constexpr):
    """One warp that keeps the copy engine busy: blocks of K, each ahead of V's, and Q after the first."""
    CONSUMERS: gl.constexpr = TILES.consumers
    BLOCK: gl.constexpr = TILES.block
    at = 0
    walked = 0
    start, end, step = own_tiles(p, TILES)
    batch, head, block = tile_at(p, start, TILES)
    for place in range(start, end, step):
        next_batch, next_head, next_block = tile_at(p, gl.minimum(place + step, end - 1), TILES)
        kv_head = head // p.group
        first, last = key_blocks(p, block, TILES)
        fetch(k, batch, kv_head, (last - 1) * BLOCK, k_ring, at, TILES.stages)
        for part in gl.static_range(CONSUMERS):
            mbarrier.wait(q_ring.empty.index(part), (walked & 1) ^ 1)
            mbarrier.expect(q_ring.full.index(part), q.block_type.nbytes)
            row = (block * CONSUMERS + part) * ROWS
            tma.async_copy_global_to_shared(q, [batch, head, row, 0], q_ring.full.index(part), q_ring.slots.index(part))
        for i in range(1, last - first):
            fetch(k, batch, kv_head, (last - 1 - i) * BLOCK, k_ring, at + i, TILES.stages)
            fetch(v, batch, kv_head, (last - i) * BLOCK, v_ring, at + i - 1, TILES.stages)
        at += last - first
        fetch(v, batch, kv_head, first * BLOCK, v_ring, at - 1, TILES.stages)
        walked += 1  # noqa: SIM113
        batch = next_batch
        head = next_head
        block = next_block


@gluon.jit
def scores(q, k_ring, place, KEYS: gl.constexpr, TILES: gl.constexpr):
    """Q Kᵀ [64, KEYS] of the first keys of the block at `place`, issued."""
    zeros = gl.zeros([ROWS, KEYS], gl.float32, mma_layout(KEYS))
    k = k_ring.slots.index(place % TILES.stages).reshape([TILES.block, TILES.head_size]).slice(0, KEYS)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def scored(s, q, PENDING: gl.constexpr, TILES: gl.constexpr):
    """The issued scores, and Q where they read it from registers, when PENDING later products are under way."""
    if TILES.q_in_registers:
        return warpgroup_mma_wait(PENDING, (s, q))
    else:
        return warpgroup_mma_wait(PENDING, (s,)), q


@gluon.jit
def weighted(weights, v_ring, place, acc, TILES: gl.constexpr):
    """acc + P V of the first keys of the block at `place`, as many as P has columns, issued."""
    v = v_ring.slots.index(place % TILES.stages).reshape([TILES.block, TILES.head_size])
    return warpgroup_mma(weights, v.slice(0, weights.shape[1]), acc, is_async=True)


@gluon.jit
def consume(o, out, q_ring, k_ring, v_ring, turns, p, PART: gl.constexpr, TILES: gl.constexpr):
    """One warpgroup: 64 queries against all their keys, tile after tile, the last block of keys first."""
    FIRST: gl.constexpr = first_keys(PART, TILES)
    HEAD: gl.constexpr = TILES.head_size
    VALUES: gl.constexpr = mma_layout(HEAD)
    STAGES: gl.constexpr = TILES.stages
    at = 0
    walked = 0
    issued = 0
    start, end, step = own_tiles(p, TILES)
    batch, head, block = tile_at(p, start, TILES)
    for place in range(start, end, step):
        # Ahead of time: the latency is hidden here, and would not be between two tiles.
        next_batch, next_head, next_block = tile_at(p, gl.minimum(place + step, end - 1), TILES)
        first, last = key_blocks(p, block, TILES)
        n = last - first
        row = (block * TILES.consumers + PART) * ROWS
        column = (last - 1) * TILES.block
        acc = gl.zeros([ROWS, HEAD], gl.float32, VALUES)
        q = q_ring.slots.index(PART).reshape([ROWS, HEAD])
        if TILES.skips:
            # The last block may lie behind every query of this warpgroup though not of the tile.
            hidden = (n > 1) & (gl.minimum(row + ROWS + p.right, p.keys) <= column)
            wait_full(k_ring, at, STAGES, pred=hidden)
            if hidden:
                release(k_ring, at, STAGES)
                at += 1
                n -= 1
                column -= TILES.block
        mbarrier.wait(q_ring.full.index(PART), walked & 1)
        if TILES.q_in_registers:
            q = q.load(gl.DotOperandLayout(0, mma_layout(TILES.block), 2))
            mbarrier.arrive(q_ring.empty.index(PART), count=1)
        wait_full(k_ring, at, STAGES)
        s = scores(q, k_ring, at, FIRST, TILES)
        if TILES.skips and hidden:
            take_turn(turns, issued, PART)
            pass_turn(turns, PART, TILES)
            issued += 1
        s, q = scored(s, q, 0, TILES)
        release(k_ring, at, STAGES)
        if TILES.skips:
            wait_full(v_ring, at - 1, STAGES, pred=hidden)
            if hidden:
                release(v_ring, at - 1, STAGES)
        top, total, weights = opened(s, p, row, column, HEAD, TILES)
        if TILES.late:
            wait_full(k_ring, at + 1, STAGES, pred=n > 1)
        acc, top, total, issued = walk_back(
            acc, top, total, weights, q, q_ring, k_ring, v_ring, turns, p, at, issued, row, column, n, PART, TILES
        )
        at += n
        put_tile(o, out, q_ring, p, acc, top, total, batch, head, row, PART, TILES)
        walked += 1  # noqa: SIM113
        batch = next_batch
        head = next_head
        block = next_block
    tma.store_wait(0)


@gluon.jit
def walk_back(
    acc, top, total, weights, q, q_ring, k_ring, v_ring, turns, p, at, issued, row, column, n,
    PART: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """All n blocks of a tile's keys from the one at `at`, whose weights are there, to the first; and what is issued."""
    FIRST: gl.constexpr = first_keys(PART, TILES)
    if TILES.block == FIRST:
        for i in range(1, n):
            acc, top, total, weights = advance(
                acc, top, total, weights, q, k_ring, v_ring, turns, p, at + i, issued, row,
                column - i * TILES.block, i < n - 1, PART, TILES,
            )  # fmt: skip
            issued += 1
        if TILES.own_output and not TILES.q_in_registers:
            mbarrier.arrive(q_ring.empty.index(PART), count=1)
        acc = finished(acc, weights, v_ring, at + n - 1, TILES)
    elif n > 1:
        # The first block is narrower than those in the loop, and so are its weights.
        acc, top, total, whole = advance(
            acc, top, total, weights, q, k_ring, v_ring, turns, p, at + 1, issued, row, column - TILES.block,
            n > 2, PART, TILES,
        )  # fmt: skip
        for i in range(2, n):
            acc, top, total, whole = advance(
                acc, top, total, whole, q, k_ring, v_ring, turns, p, at + i, issued + i - 1, row,
                column - i * TILES.block, i < n - 1, PART, TILES,
            )  # fmt: skip
        issued += n - 1
        acc = finished(acc, whole, v_ring, at + n - 1, TILES)
    else:
        acc = finished(acc, weights, v_ring, at, TILES)
    return acc, top, total, issued


@gluon.jit
def put_tile(
    o, out, q_ring, p, acc, top, total, batch, head, row, PART: gl.constexpr, TILES: gl.constexpr
):  # fmt: skip
    """The 64 queries from `row` to o and lse; the copy engine may still read their room in shared memory."""
    HEAD: gl.constexpr = TILES.head_size
    VALUES: gl.constexpr = mma_layout(HEAD)
    total = row_sums(total, TILES)
    room = out.index(PART)
    tma.store_wait(0)
    acc = acc * gl.convert_layout(inverse(total), gl.SliceLayout(1, VALUES))[:, None]
    room.reshape([ROWS, HEAD]).store(acc.to(element(TILES)))
    fence_async_shared()
    tma.async_copy_shared_to_global(o, [batch, head, row, 0], room)
    store_lse(p, batch, head, row, top, total)
    if not TILES.own_output:
        tma.store_wait(0)
        mbarrier.arrive(q_ring.empty.index(PART), count=1)


@gluon.jit
def advance(
    acc, top, total, weights, q, k_ring, v_ring, turns, p, at, issued, row, column, more,
    PART: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """One block of keys: its scores and the products of the block before are under way together."""
    VALUES: gl.constexpr = mma_layout(TILES.head_size)
    STAGES: gl.constexpr = TILES.stages
    if not TILES.late:
        wait_full(k_ring, at, STAGES)
    take_turn(turns, issued, PART)
    s = scores(q, k_ring, at, TILES.block, TILES)
    wait_full(v_ring, at - 1, STAGES)
    acc = weighted(weights, v_ring, at - 1, acc, TILES)
    pass_turn(turns, PART, TILES)
    s, q = scored(s, q, 1, TILES)
    release(k_ring, at, STAGES)
    higher, shrink, total, fresh = softened(s, top, total, p, row, column, TILES)
    if TILES.late:
        # Waiting here for the next block of K splits the code, so that the assembler cannot move the wait for
        # the product above the softmax that hides it.
        wait_full(k_ring, at + 1, STAGES, pred=more)
        acc, weights, fresh, total, shrink = warpgroup_mma_wait(0, (acc, weights, fresh, total, shrink))
    else:
        acc, weights = warpgroup_mma_wait(0, (acc, weights))
    release(v_ring, at - 1, STAGES)
    acc = acc * gl.convert_layout(shrink, gl.SliceLayout(1, VALUES))[:, None]
    weights = gl.convert_layout(rounded(fresh, TILES), gl.DotOperandLayout(0, VALUES, 2))
    return acc, higher, total, weights


@gluon.jit
def finished(acc, weights, v_ring, at, TILES: gl.constexpr):
    """acc with the product of the last block."""
    wait_full(v_ring, at, TILES.stages)
    acc = weighted(weights, v_ring, at, acc, TILES)
    acc, weights = warpgroup_mma_wait(0, (acc, weights))
    release(v_ring, at, TILES.stages)
    return acc


@gluon.jit(do_not_specialize=["heads", "group", "queries", "keys", "right", "left", "row_blocks", "tiles"])
def forward(
    q, k, v, o, lse, schedule, scale, inner, heads, group, queries, keys, right, left, row_blocks, tiles,
    TILES: gl.constexpr,
):  # fmt: skip
    """Attention of q with k and v into o and lse, fp32 [batch, heads, queries]; one launch.

    q, k, v, o: descriptors of [batch, heads, positions, head size], 16-bit; K and V have heads / group heads.
    schedule: int32, `schedule.table`, where TILES.table.
    scale: of the scores, times log₂ e; with a soft cap the cap times log₂ e, and inner what `bent` says.
    right, left: query i sees the keys from i + left to i + right.
    row_blocks: of one head; tiles: of all heads of the batch.
    """
    CONSUMERS: gl.constexpr = TILES.consumers
    q_ring = ring_of(q, CONSUMERS, 1)
    k_ring = ring_of(k, TILES.stages, CONSUMERS)
    v_ring = ring_of(v, TILES.stages, CONSUMERS)
    if TILES.own_output:
        out = gl.allocate_shared_memory(o.dtype, [CONSUMERS, 1, 1, ROWS, TILES.head_size], o.layout)
    else:
        out = q_ring.slots
    turns = barriers(CONSUMERS, 1)
    fence_async_shared()
    p = Problem(lse, schedule, scale, inner, heads, group, queries, keys, right, left, row_blocks, tiles)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consume, (o, out, q_ring, k_ring, v_ring, turns, p, 0, TILES)),
                (produce, (q, k, v, q_ring, k_ring, v_ring, p, TILES)),
            ],
            [1],
            [24],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (o, out, q_ring, k_ring, v_ring, turns, p, 0, TILES)),
                (consume, (o, out, q_ring, k_ring, v_ring, turns, p, 1, TILES)),
                (produce, (q, k, v, q_ring, k_ring, v_ring, p, TILES)),
            ],
            [4, 1],
            [TILES.registers, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (o, out, q_ring, k_ring, v_ring, turns, p, 0, TILES)),
                (consume, (o, out, q_ring, k_ring, v_ring, turns, p, 1, TILES)),
                (consume, (o, out, q_ring, k_ring, v_ring, turns, p, 2, TILES)),
                (produce, (q, k, v, q_ring, k_ring, v_ring, p, TILES)),
            ],
            [4, 4, 1],
            [TILES.registers, TILES.registers, 24],
        )
