"""How fast the multiprocessors of a GPU read shared memory, walk their last-level cache, and multiply and add fp32.

Needs Triton and a CUDA device; `tests/gpu/test_ceilings.py` holds the results against the clock, and the cache against
a kernel in CUDA C++.

Shared memory. Every thread reads 16 bytes that lie beside its neighbour's, so a warp's request has no bank conflict
and takes four cycles at 128 bytes a cycle. The values are summed and the sum is written once, or the
compiler would drop the reads.

Cache. Each program walks its own part of memory many times within one launch; all parts together fit the cache. Loads
bypass L1. The time of many walks minus that of few contains no launch, no first fetch from DRAM, and no start or end
of programs.

Arithmetic outside matrix units. Every thread keeps chains of dependent multiply-adds in registers, enough to hide the
latency of each, and accesses memory once.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tilewright.hardware.architectures import limits_of

WARPS = 8
TILES = 8
"""Tiles of 16 bytes a thread, 32 KiB a program; a power of two, so that a mask gives the next."""
PROGRAMS_PER_SM = 4
"""While one program waits at its barrier, others read."""
PASSES = 128, 640
"""Of the two launches whose difference is timed: passes over the tiles."""


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


DIRECTIONS = {"copy": (True, True), "read": (True, False), "write": (False, True)}
"""Whether a walk reads, and whether it writes."""
WALKS = 64, 320
"""Of the two launches whose difference is timed."""


class Walk(NamedTuple):
    """Programs and warps of a multiprocessor, and the share of the cache that all programs walk."""

    programs_per_sm: int
    warps: int
    values: int
    """fp32 values of a thread in one step: requests of 16 bytes, all in flight at once."""
    share: float
    """All memory walked, as a share of the cache."""

    @property
    def block(self) -> int:
        """fp32 values of a program in one step."""
        return 32 * self.warps * self.values


SHAPES = (Walk(1, 32, 16, 0.35), Walk(1, 32, 8, 0.6))
"""On an H200 the first reads and writes fastest (9.1 and 4.9 TB/s), the second copies fastest (8.2). With a quarter of
the cache, or with two programs of 16 warps, copies reach 7.4 to 7.9, reads 8.5 to 9.1, writes 4.3 to 4.7."""


@triton.jit
def walk(source, target, elements, walks, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Go over the program's `elements` (a multiple of BLOCK) of fp32 `walks` times: read, write, or copy them.

    `source` and `target` hold `elements` a program; without WRITES, `target` gets BLOCK sums of each program, or the
    compiler would drop the loads.
    """
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    first = program * elements
    total = tl.zeros([BLOCK], tl.float32)
    for turn in range(walks):
        for start in range(0, elements, BLOCK):
            at = first + start + lane
            if READS:
                value = tl.load(source + at, cache_modifier=".cg")
                if not WRITES:
                    total += value
            else:
                value = total + turn
            if WRITES:
                tl.store(target + at, value)
    if not WRITES:
        tl.store(target + program * BLOCK + lane, total)


class Walker(NamedTuple):
    """Walks of one direction and shape."""

    walk: Callable[[int], object]
    """Launches a kernel with this many walks."""
    nbytes: int
    """Read and written by one walk of all programs."""


def cache_walkers(device: torch.device, cache_bytes: int) -> dict[str, list[Walker]]:
    """For each of `DIRECTIONS` a walker of each shape, over random fp32 within a cache of `cache_bytes`."""
    sms = limits_of(device).multiprocessors
    return {
        direction: [_walker(device, cache_bytes, sms, direction, shape) for shape in SHAPES] for direction in DIRECTIONS
    }


def _walker(device: torch.device, cache_bytes: int, sms: int, direction: str, shape: Walk) -> Walker:
    reads, writes = DIRECTIONS[direction]
    programs = shape.programs_per_sm * sms
    blocks = max(1, round(cache_bytes * shape.share / (reads + writes) / (4 * shape.block * programs)))
    elements = blocks * shape.block
    source = torch.randn(programs * elements, device=device)
    target = torch.zeros_like(source)

    def walks(number: int) -> object:
        with torch.cuda.device(device):
            return walk[(programs,)](
                source, target, elements, number, reads, writes, shape.block, num_warps=shape.warps
            )

    return Walker(walks, (reads + writes) * source.nbytes)


CHAINS = 8
"""Chains of a thread."""
STEPS = 32
"""Unrolled steps of each chain, so that the loop costs little."""
TURNS = 256, 1024
"""Of that loop, in the two launches."""


@triton.jit
def chains(out, factor, term, turns, BLOCK: tl.constexpr, STEPS: tl.constexpr):  # type: ignore[no-untyped-def]
    """x ← x · factor + term, `turns` × STEPS times for each x of `out` fp32[programs × BLOCK], which starts as its
    index in the block."""
    lane = tl.arange(0, BLOCK)
    x = lane.to(tl.float32)
    for _ in range(turns):
        for _step in tl.static_range(STEPS):
            x = tl.fma(x, factor, term)
    tl.store(out + tl.program_id(0) * BLOCK + lane, x)


def multiply_adder(device: torch.device) -> tuple[Callable[[int], object], int]:
    """A call that runs `turns` turns on every multiprocessor, and the FLOPs of one turn."""
    programs = PROGRAMS_PER_SM * limits_of(device).multiprocessors
    block = 32 * WARPS * CHAINS
    out = torch.empty(programs * block, device=device)

    def run(turns: int) -> object:
        with torch.cuda.device(device):
            # x, 1.5 - x, x again: bits change in every step, and nothing overflows or settles.
            return chains[(programs,)](out, -1.0, 1.5, turns, block, STEPS, num_warps=WARPS)

    return run, 2 * programs * block * STEPS
