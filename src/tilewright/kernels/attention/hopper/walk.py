"""How the warps of a Hopper attention kernel walk its tiles: which are theirs, rings of slots, taking turns."""
# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

ROWS = gl.constexpr(64)
"""Queries of a warpgroup."""


class Problem(NamedTuple):
    """What every warp needs of the call; the parameters of the kernels say what each is."""

    lse: Any
    schedule: Any
    scale: Any
    inner: Any
    heads: Any
    group: Any
    queries: Any
    keys: Any
    right: Any
    left: Any
    row_blocks: Any
    tiles: Any


class Ring(NamedTuple):
    """Slots in shared memory with their barriers: full when a copy has landed, empty when all have read it.

    A place counts what has gone through the ring: its slot is place mod slots, and how often the ring has gone
    round gives the parity that the barriers are at.
    """

    slots: Any
    full: Any
    empty: Any


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def ring_of(descriptor, SLOTS: gl.constexpr, READERS: gl.constexpr):
    """A ring of copies through `descriptor`, each read by READERS warpgroups."""
    TALL: gl.constexpr = descriptor.block_type.shape[2]
    WIDE: gl.constexpr = descriptor.block_type.shape[3]
    slots = gl.allocate_shared_memory(descriptor.dtype, [SLOTS, 1, 1, TALL, WIDE], descriptor.layout)
    return Ring(slots, barriers(SLOTS, 1), barriers(SLOTS, READERS))


@gluon.jit
def wait_full(ring, place, SLOTS: gl.constexpr, pred=True):
    mbarrier.wait(ring.full.index(place % SLOTS), (place // SLOTS) & 1, pred=pred)


@gluon.jit
def wait_empty(ring, place, SLOTS: gl.constexpr):
    mbarrier.wait(ring.empty.index(place % SLOTS), ((place // SLOTS) & 1) ^ 1)


@gluon.jit
def release(ring, place, SLOTS: gl.constexpr):
    mbarrier.arrive(ring.empty.index(place % SLOTS), count=1)


@gluon.jit
def take_turn(turns, issued, PART: gl.constexpr):
    """Wait until it is this warpgroup's turn to issue products: while one multiplies, the others do softmax."""
    mbarrier.wait(turns.index(PART), (issued & 1) ^ (1 if PART == 0 else 0))


@gluon.jit
def pass_turn(turns, PART: gl.constexpr, TILES: gl.constexpr):
    mbarrier.arrive(turns.index((PART + 1) % TILES.consumers), count=1)


@gluon.jit
def own_tiles(p, TILES: gl.constexpr):
    """First and last (excluded) place in the order of tiles, and the step, of this program."""
    if TILES.table:
        program = gl.program_id(0)
        return gl.load(p.schedule + program), gl.load(p.schedule + program + 1), 1
    else:
        return gl.program_id(0), p.tiles, gl.num_programs(0)


@gluon.jit
def tile_at(p, place, TILES: gl.constexpr):
    """Batch entry, head and row block of a tile. Without a table a head's longest come first."""
    if TILES.table:
        packed = gl.load(p.schedule + place)
        head = packed >> 16
        block = packed & 0xFFFF
    else:
        head = place // p.row_blocks
        block = place - head * p.row_blocks
        if TILES.banded:
            block = p.row_blocks - 1 - block
    batch = head // p.heads
    return batch, head - batch * p.heads, block


@gluon.jit
def key_blocks(p, block, TILES: gl.constexpr):
    """First and last (excluded) key block that a row block sees; one at least, that empty rows be written too."""
    ROW_BLOCK: gl.constexpr = ROWS * TILES.consumers
    if TILES.banded:
        end = gl.minimum((block + 1) * ROW_BLOCK + p.right, p.keys)
        last = gl.maximum((end + TILES.block - 1) // TILES.block, 1)
        first = gl.minimum(gl.maximum(block * ROW_BLOCK + p.left, 0) // TILES.block, last - 1)
        return first, last
    else:
        return 0, (p.keys + TILES.block - 1) // TILES.block
