"""FlashAttention forward in Gluon for Hopper (Dao et al., arXiv:2205.14135; Shah et al., arXiv:2407.08608).

A program owns tiles: 64, 128 or 192 queries of one head, against all keys that they see. Its warps:

    produce    one warp: TMA loads of Q, and of blocks of K and V into two rings of two slots
    consume    one to three warpgroups of 64 queries each. Q Kᵀ of a block is issued together with P V of the block
               before, so that softmax runs beside the tensor cores; P stays in registers; warpgroups issue in turns.
               The last block of keys comes first, so that where blocks and positions align only it needs a mask.

Limit: to head size 64 the exponentials and instruction issue, above it the tensor cores under the power cap.
On an H200, bf16, 16384 positions, 0.94 to 1.21 times cuDNN: 401 to 550 TFLOP/s (d 64), 551 to 691 (d 128), 531 to 718
(d 256), full. docs/experiments.md has all times and the variants that lost.
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

from tilewright.kernels.attention.hopper.pipeline import (
    ROWS,
    Problem,
    key_blocks,
    make_barriers,
    make_ring,
    ping_pong_signal,
    ping_pong_wait,
    release,
    tile_at,
    tiles_of_program,
    wait_empty,
    wait_full,
)
from tilewright.kernels.attention.hopper.softmax import (
    element,
    first_keys,
    mma_layout,
    rounded,
    row_sums,
    safe_inverse,
    softmax_first,
    softmax_update,
    store_lse,
)


@gluon.jit
def load_block(descriptor, batch, head, row, ring, index, STAGES: gl.constexpr):
    """Issue the load of a block of K or V into its slot, once that is free."""
    wait_empty(ring, index, STAGES)
    slot = index % STAGES
    mbarrier.expect(ring.full.index(slot), descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, [batch, head, row, 0], ring.full.index(slot), ring.slots.index(slot))


@gluon.jit
def produce(q, k, v, q_ring, k_ring, v_ring, p, TILES: gl.constexpr):
    """One warp that issues all loads: blocks of K, each ahead of the one of V, and Q after the first."""
    CONSUMERS: gl.constexpr = TILES.consumers
    BLOCK: gl.constexpr = TILES.block
    ring_index = 0
    tile_count = 0
    start, end, step = tiles_of_program(p, TILES)
    batch, head, block = tile_at(p, start, TILES)
    for index in range(start, end, step):
        next_batch, next_head, next_block = tile_at(p, gl.minimum(index + step, end - 1), TILES)
        kv_head = head // p.group
        first, last = key_blocks(p, block, TILES)
        load_block(k, batch, kv_head, (last - 1) * BLOCK, k_ring, ring_index, TILES.stages)
        for part in gl.static_range(CONSUMERS):
            mbarrier.wait(q_ring.empty.index(part), (tile_count & 1) ^ 1)
            mbarrier.expect(q_ring.full.index(part), q.block_type.nbytes)
            row = (block * CONSUMERS + part) * ROWS
            tma.async_copy_global_to_shared(q, [batch, head, row, 0], q_ring.full.index(part), q_ring.slots.index(part))
        for i in range(1, last - first):
            load_block(k, batch, kv_head, (last - 1 - i) * BLOCK, k_ring, ring_index + i, TILES.stages)
            load_block(v, batch, kv_head, (last - i) * BLOCK, v_ring, ring_index + i - 1, TILES.stages)
        ring_index += last - first
        load_block(v, batch, kv_head, first * BLOCK, v_ring, ring_index - 1, TILES.stages)
        tile_count += 1  # noqa: SIM113
        batch = next_batch
        head = next_head
        block = next_block


@gluon.jit
def issue_qk(q, k_ring, index, KEYS: gl.constexpr, TILES: gl.constexpr):
    """Issue Q Kᵀ [64, KEYS] with the first keys of the block at `index`."""
    zeros = gl.zeros([ROWS, KEYS], gl.float32, mma_layout(KEYS))
    k = k_ring.slots.index(index % TILES.stages).reshape([TILES.block, TILES.head_size]).slice(0, KEYS)
    return warpgroup_mma(q, k.permute((1, 0)), zeros, use_acc=False, is_async=True)


@gluon.jit
def wait_qk(s, q, PENDING: gl.constexpr, TILES: gl.constexpr):
    """Wait for issued scores until PENDING later products are in flight; gives them, and Q, which they may read."""
    if TILES.q_in_registers:
        return warpgroup_mma_wait(PENDING, (s, q))
    else:
        return warpgroup_mma_wait(PENDING, (s,)), q


@gluon.jit
def issue_pv(weights, v_ring, index, acc, TILES: gl.constexpr):
    """Issue acc + P V with the first keys of the block at `index`, as many as P has columns."""
    v = v_ring.slots.index(index % TILES.stages).reshape([TILES.block, TILES.head_size])
    return warpgroup_mma(weights, v.slice(0, weights.shape[1]), acc, is_async=True)


@gluon.jit
def consume(o, out, q_ring, k_ring, v_ring, ping_pong, p, WG: gl.constexpr, TILES: gl.constexpr):
    """One warpgroup: 64 queries of each tile against all their keys, the last block of keys first."""
    FIRST: gl.constexpr = first_keys(WG, TILES)
    HEAD: gl.constexpr = TILES.head_size
    VALUES: gl.constexpr = mma_layout(HEAD)
    STAGES: gl.constexpr = TILES.stages
    ring_index = 0
    tile_count = 0
    turn = 0
    start, end, step = tiles_of_program(p, TILES)
    batch, head, block = tile_at(p, start, TILES)
    for index in range(start, end, step):
        # Looked up a tile ahead, which hides the latency.
        next_batch, next_head, next_block = tile_at(p, gl.minimum(index + step, end - 1), TILES)
        first, last = key_blocks(p, block, TILES)
        n = last - first
        row = (block * TILES.consumers + WG) * ROWS
        column = (last - 1) * TILES.block
        acc = gl.zeros([ROWS, HEAD], gl.float32, VALUES)
        q = q_ring.slots.index(WG).reshape([ROWS, HEAD])
        if TILES.may_skip_block:
            # The last block may be hidden from all of this warpgroup's queries, though not from all of the tile's.
            hidden = (n > 1) & (gl.minimum(row + ROWS + p.right, p.keys) <= column)
            wait_full(k_ring, ring_index, STAGES, pred=hidden)
            if hidden:
                release(k_ring, ring_index, STAGES)
                ring_index += 1
                n -= 1
                column -= TILES.block
        mbarrier.wait(q_ring.full.index(WG), tile_count & 1)
        if TILES.q_in_registers:
            q = q.load(gl.DotOperandLayout(0, mma_layout(TILES.block), 2))
            mbarrier.arrive(q_ring.empty.index(WG), count=1)
        wait_full(k_ring, ring_index, STAGES)
        s = issue_qk(q, k_ring, ring_index, FIRST, TILES)
        if TILES.may_skip_block and hidden:
            ping_pong_wait(ping_pong, turn, WG)
            ping_pong_signal(ping_pong, WG, TILES)
            turn += 1
        s, q = wait_qk(s, q, 0, TILES)
        release(k_ring, ring_index, STAGES)
        if TILES.may_skip_block:
            wait_full(v_ring, ring_index - 1, STAGES, pred=hidden)
            if hidden:
                release(v_ring, ring_index - 1, STAGES)
        row_max, row_sum, weights = softmax_first(s, p, row, column, HEAD, TILES)
        if TILES.late_wait:
            wait_full(k_ring, ring_index + 1, STAGES, pred=n > 1)
        acc, row_max, row_sum, turn = loop_over_keys(
            acc, row_max, row_sum, weights, q, q_ring, k_ring, v_ring, ping_pong, p, ring_index, turn, row, column, n,
            WG, TILES,
        )  # fmt: skip
        ring_index += n
        store_tile(o, out, q_ring, p, acc, row_max, row_sum, batch, head, row, WG, TILES)
        tile_count += 1  # noqa: SIM113
        batch = next_batch
        head = next_head
        block = next_block
    tma.store_wait(0)


@gluon.jit
def loop_over_keys(
    acc, row_max, row_sum, weights, q, q_ring, k_ring, v_ring, ping_pong, p, ring_index, turn, row, column, n,
    WG: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """(acc, maximum, lane sums, turn) after all n key blocks; `weights` is P of the last block, at `ring_index`."""
    FIRST: gl.constexpr = first_keys(WG, TILES)
    if TILES.block == FIRST:
        for i in range(1, n):
            acc, row_max, row_sum, weights = step_over_block(
                acc, row_max, row_sum, weights, q, k_ring, v_ring, ping_pong, p, ring_index + i, turn, row,
                column - i * TILES.block, i < n - 1, WG, TILES,
            )  # fmt: skip
            turn += 1
        if TILES.own_output and not TILES.q_in_registers:
            mbarrier.arrive(q_ring.empty.index(WG), count=1)
        acc = finish_pv(acc, weights, v_ring, ring_index + n - 1, TILES)
    elif n > 1:
        # The first block, and so its P, is narrower than those in the loop.
        acc, row_max, row_sum, whole = step_over_block(
            acc, row_max, row_sum, weights, q, k_ring, v_ring, ping_pong, p, ring_index + 1, turn, row,
            column - TILES.block, n > 2, WG, TILES,
        )  # fmt: skip
        for i in range(2, n):
            acc, row_max, row_sum, whole = step_over_block(
                acc, row_max, row_sum, whole, q, k_ring, v_ring, ping_pong, p, ring_index + i, turn + i - 1, row,
                column - i * TILES.block, i < n - 1, WG, TILES,
            )  # fmt: skip
        turn += n - 1
        acc = finish_pv(acc, whole, v_ring, ring_index + n - 1, TILES)
    else:
        acc = finish_pv(acc, weights, v_ring, ring_index, TILES)
    return acc, row_max, row_sum, turn


@gluon.jit
def store_tile(
    o, out, q_ring, p, acc, row_max, row_sum, batch, head, row, WG: gl.constexpr, TILES: gl.constexpr
):  # fmt: skip
    """Store the 64 queries from `row` on to o and lse, once TMA has read the last tile from the buffer."""
    HEAD: gl.constexpr = TILES.head_size
    VALUES: gl.constexpr = mma_layout(HEAD)
    row_sum = row_sums(row_sum, TILES)
    buffer = out.index(WG)
    tma.store_wait(0)
    acc = acc * gl.convert_layout(safe_inverse(row_sum), gl.SliceLayout(1, VALUES))[:, None]
    buffer.reshape([ROWS, HEAD]).store(acc.to(element(TILES)))
    fence_async_shared()
    tma.async_copy_shared_to_global(o, [batch, head, row, 0], buffer)
    store_lse(p, batch, head, row, row_max, row_sum)
    if not TILES.own_output:
        tma.store_wait(0)
        mbarrier.arrive(q_ring.empty.index(WG), count=1)


@gluon.jit
def step_over_block(
    acc, row_max, row_sum, weights, q, k_ring, v_ring, ping_pong, p, ring_index, turn, row, column, more,
    WG: gl.constexpr, TILES: gl.constexpr,
):  # fmt: skip
    """One block of keys: its Q Kᵀ and the P V of the block before are in flight together."""
    VALUES: gl.constexpr = mma_layout(TILES.head_size)
    STAGES: gl.constexpr = TILES.stages
    if not TILES.late_wait:
        wait_full(k_ring, ring_index, STAGES)
    ping_pong_wait(ping_pong, turn, WG)
    s = issue_qk(q, k_ring, ring_index, TILES.block, TILES)
    wait_full(v_ring, ring_index - 1, STAGES)
    acc = issue_pv(weights, v_ring, ring_index - 1, acc, TILES)
    ping_pong_signal(ping_pong, WG, TILES)
    s, q = wait_qk(s, q, 1, TILES)
    release(k_ring, ring_index, STAGES)
    new_max, rescale, row_sum, new_weights = softmax_update(s, row_max, row_sum, p, row, column, TILES)
    if TILES.late_wait:
        # This wait splits the basic block, so that ptxas cannot move the wait for P V above the softmax that hides
        # it.
        wait_full(k_ring, ring_index + 1, STAGES, pred=more)
        acc, weights, new_weights, row_sum, rescale = warpgroup_mma_wait(
            0, (acc, weights, new_weights, row_sum, rescale)
        )
    else:
        acc, weights = warpgroup_mma_wait(0, (acc, weights))
    release(v_ring, ring_index - 1, STAGES)
    acc = acc * gl.convert_layout(rescale, gl.SliceLayout(1, VALUES))[:, None]
    weights = gl.convert_layout(rounded(new_weights, TILES), gl.DotOperandLayout(0, VALUES, 2))
    return acc, new_max, row_sum, weights


@gluon.jit
def finish_pv(acc, weights, v_ring, ring_index, TILES: gl.constexpr):
    """acc with P V of the last block."""
    wait_full(v_ring, ring_index, TILES.stages)
    acc = issue_pv(weights, v_ring, ring_index, acc, TILES)
    acc, weights = warpgroup_mma_wait(0, (acc, weights))
    release(v_ring, ring_index, TILES.stages)
    return acc


@gluon.jit(do_not_specialize=["heads", "group", "queries", "keys", "right", "left", "row_blocks", "tiles"])
def forward(
    q, k, v, o, lse, schedule, scale, tanh_scale, heads, group, queries, keys, right, left, row_blocks, tiles,
    TILES: gl.constexpr,
):  # fmt: skip
    """Attention of q with k and v into o and lse, fp32 [batch, heads, queries]; one launch.

    q, k, v, o: descriptors of [batch, heads, positions, head size], 16-bit; K and V have heads / group heads.
    schedule: int32, `schedule.table`, where TILES.table.
    scale: of the scores, times log₂ e. With a soft cap c: c · log₂ e, and tanh_scale is 2 · log₂ e · scale / c.
    right, left: query i sees the keys from i + left to i + right.
    row_blocks: of one head; tiles: of all heads of the batch.
    """
    CONSUMERS: gl.constexpr = TILES.consumers
    q_ring = make_ring(q, CONSUMERS, 1)
    k_ring = make_ring(k, TILES.stages, CONSUMERS)
    v_ring = make_ring(v, TILES.stages, CONSUMERS)
    if TILES.own_output:
        out = gl.allocate_shared_memory(o.dtype, [CONSUMERS, 1, 1, ROWS, TILES.head_size], o.layout)
    else:
        out = q_ring.slots
    ping_pong = make_barriers(CONSUMERS, 1)
    fence_async_shared()
    p = Problem(lse, schedule, scale, tanh_scale, heads, group, queries, keys, right, left, row_blocks, tiles)
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consume, (o, out, q_ring, k_ring, v_ring, ping_pong, p, 0, TILES)),
                (produce, (q, k, v, q_ring, k_ring, v_ring, p, TILES)),
            ],
            [1],
            [24],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (o, out, q_ring, k_ring, v_ring, ping_pong, p, 0, TILES)),
                (consume, (o, out, q_ring, k_ring, v_ring, ping_pong, p, 1, TILES)),
                (produce, (q, k, v, q_ring, k_ring, v_ring, p, TILES)),
            ],
            [4, 1],
            [TILES.registers, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (o, out, q_ring, k_ring, v_ring, ping_pong, p, 0, TILES)),
                (consume, (o, out, q_ring, k_ring, v_ring, ping_pong, p, 1, TILES)),
                (consume, (o, out, q_ring, k_ring, v_ring, ping_pong, p, 2, TILES)),
                (produce, (q, k, v, q_ring, k_ring, v_ring, p, TILES)),
            ],
            [4, 4, 1],
            [TILES.registers, TILES.registers, 24],
        )
