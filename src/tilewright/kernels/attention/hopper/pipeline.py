"""The pipeline of a Hopper attention kernel: which tiles a program owns, rings of slots, turns of warpgroups."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROWS = gl.constexpr(64)
"""Queries of a warpgroup."""


class Problem(NamedTuple):
    """The parameters of `forward_kernel.forward` that every warp takes."""

    lse: Any
    schedule: Any
    scale: Any
    tanh_scale: Any
    heads: Any
    group: Any
    queries: Any
    keys: Any
    right: Any
    left: Any
    row_blocks: Any
    tiles: Any


class Ring(NamedTuple):
    """Slots in shared memory with two barriers each: full when a copy has landed, empty when all have read it.

    An index counts the blocks that went through the ring: its slot is index mod slots, and index // slots mod 2 is
    the parity of the barriers.
    """

    slots: Any
    full: Any
    empty: Any


@gluon.jit
def make_barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def make_ring(descriptor, SLOTS: gl.constexpr, READERS: gl.constexpr):
    """A ring of copies through `descriptor`, each read by READERS warpgroups."""
    TALL: gl.constexpr = descriptor.block_type.shape[2]
    WIDE: gl.constexpr = descriptor.block_type.shape[3]
    slots = gl.allocate_shared_memory(descriptor.dtype, [SLOTS, 1, 1, TALL, WIDE], descriptor.layout)
    return Ring(slots, make_barriers(SLOTS, 1), make_barriers(SLOTS, READERS))


@gluon.jit
def wait_full(ring, index, SLOTS: gl.constexpr, pred=True):
    mbarrier.wait(ring.full.index(index % SLOTS), (index // SLOTS) & 1, pred=pred)


@gluon.jit
def wait_empty(ring, index, SLOTS: gl.constexpr):
    mbarrier.wait(ring.empty.index(index % SLOTS), ((index // SLOTS) & 1) ^ 1)


@gluon.jit
def release(ring, index, SLOTS: gl.constexpr):
    mbarrier.arrive(ring.empty.index(index % SLOTS), count=1)


@gluon.jit
def ping_pong_wait(ping_pong, turn, WG: gl.constexpr):
    """Wait for this warpgroup's turn to issue products: while one multiplies, the others do softmax."""
    mbarrier.wait(ping_pong.index(WG), (turn & 1) ^ (1 if WG == 0 else 0))


@gluon.jit
def ping_pong_signal(ping_pong, WG: gl.constexpr, TILES: gl.constexpr):
    mbarrier.arrive(ping_pong.index((WG + 1) % TILES.consumers), count=1)


@gluon.jit
def tiles_of_program(p, TILES: gl.constexpr):
    """(first, end, step) of this program in the order of tiles."""
    if TILES.table:
        program = gl.program_id(0)
        return gl.load(p.schedule + program), gl.load(p.schedule + program + 1), 1
    else:
        return gl.program_id(0), p.tiles, gl.num_programs(0)


@gluon.jit
def tile_at(p, index, TILES: gl.constexpr):
    """(batch entry, head, row block) of a tile. Without a table a head's longest tiles come first."""
    if TILES.table:
        packed = gl.load(p.schedule + index)
        head = packed >> 16
        block = packed & 0xFFFF
    else:
        head = index // p.row_blocks
        block = index - head * p.row_blocks
        if TILES.banded:
            block = p.row_blocks - 1 - block
    batch = head // p.heads
    return batch, head - batch * p.heads, block


@gluon.jit
def key_blocks(p, block, TILES: gl.constexpr):
    """(first, end) of the key blocks that a row block sees; at least one, so that rows without keys are stored too."""
    ROW_BLOCK: gl.constexpr = ROWS * TILES.consumers
    if TILES.banded:
        end = gl.minimum((block + 1) * ROW_BLOCK + p.right, p.keys)
        last = gl.maximum((end + TILES.block - 1) // TILES.block, 1)
        first = gl.minimum(gl.maximum(block * ROW_BLOCK + p.left, 0) // TILES.block, last - 1)
        return first, last
    else:
        return 0, (p.keys + TILES.block - 1) // TILES.block
