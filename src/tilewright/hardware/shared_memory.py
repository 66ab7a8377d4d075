"""How fast the multiprocessors of a GPU read their shared memory; needs Triton and a CUDA device.

Every thread reads 16 bytes that lie beside its neighbour's, so a warp's request has no bank conflict
and takes four cycles at 128 bytes a cycle. The values are summed and the sum is written once, or the
compiler would drop the reads. `tests/gpu/test_ceilings.py` holds the result against the clock.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.hardware.architectures import limits_of

WARPS = 8
TILES = 8
"""Tiles of 16 bytes a thread, 32 KiB a program; a power of two, so that a mask gives the next."""
PROGRAMS_PER_SM = 4
"""While one program waits at its barrier, others read."""
FEW, MANY = 128, 640
"""Passes over the tiles."""


@gluon.jit
def read_shared(out, passes, WARPS: gl.constexpr, TILES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Fill `TILES` tiles, then read all of them `passes` times; `out` int32[programs × 128 × WARPS]."""
    block: gl.constexpr = 128 * WARPS
    layout: gl.constexpr = gl.BlockedLayout([4], [32], [WARPS], [0])
    lane = gl.arange(0, block, layout=layout)
    memory = gl.allocate_shared_memory(gl.int32, [TILES, block], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    for tile in gl.static_range(TILES):
        memory.index(tile).store(lane * passes + tile)
    total = gl.zeros([block], gl.int32, layout)
    for turn in range(passes):
        for tile in gl.static_range(TILES):
            # The tile depends on the turn, or the compiler would read each once and keep it.
            total += memory.index((tile + turn) & (TILES - 1)).load(layout)
    gl.store(out + gl.program_id(0) * block + lane, total)


def shared_memory_reader(device: torch.device) -> tuple[Callable[[int], object], int]:
    """A call that reads shared memory on every multiprocessor `passes` times, and the bytes of one pass."""
    programs = PROGRAMS_PER_SM * limits_of(device).multiprocessors
    out = torch.empty(programs * 128 * WARPS, dtype=torch.int32, device=device)

    def read(passes: int) -> object:
        with torch.cuda.device(device):
            return read_shared[(programs,)](out, passes, WARPS=WARPS, TILES=TILES, num_warps=WARPS)

    return read, programs * TILES * 128 * WARPS * 4
