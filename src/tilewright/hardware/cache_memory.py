"""How fast the multiprocessors of a GPU read and write its last-level cache; needs Triton and a CUDA device.

Each program walks its own part of memory many times within one launch; all parts together fit the cache. Loads
bypass L1. The time of many walks minus that of few contains no launch, no first fetch from DRAM, and no start or end
of programs. `tests/gpu/test_ceilings.py` holds the result
against a kernel in CUDA C++.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tilewright.hardware.architectures import limits_of

DIRECTIONS = {"copy": (True, True), "read": (True, False), "write": (False, True)}
"""Whether a walk reads, and whether it writes."""
FEW, MANY = 64, 320
"""Walks of the two launches whose difference is timed."""


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
