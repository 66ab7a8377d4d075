"""How fast the multiprocessors of a GPU read and write its last-level cache; needs Triton and a CUDA device.

Each program walks memory of its own, over and over within one launch; all of it together stays in the cache.
Loads pass the multiprocessors' own caches by. The time of many walks less that of few has no launch in it, no
first fetch from DRAM, and no programs that begin or end alone. `tests/gpu/test_ceilings.py` holds the result
against a kernel in CUDA C++.
"""
# mypy: allow-untyped-decorators

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl

WAYS = {"copy": (True, True), "read": (True, False), "write": (False, True)}
"""Whether a walk reads, and whether it writes."""
FEW, MANY = 64, 320
"""Walks."""


class Shape(NamedTuple):
    """How the work is laid over a multiprocessor, and how much of the cache it covers."""

    programs_per_sm: int
    warps: int
    values: int
    """fp32 a thread and step: requests of 16 bytes, all under way at once."""
    share: float
    """Of the cache, of all that is walked."""

    @property
    def block(self) -> int:
        """fp32 values a program and step."""
        return 32 * self.warps * self.values


SHAPES = (Shape(1, 32, 16, 0.35), Shape(1, 32, 8, 0.6))
"""On an H200 the one reads and writes most, 9.1 and 4.9 TB/s, the other copies most, 8.2; a quarter of the cache, or
two programs of 16 warps, copy 7.4 to 7.9, read 8.5 to 9.1 and write 4.3 to 4.7."""


@triton.jit
def walk(source, target, elements, walks, READS: tl.constexpr, WRITES: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Go over the program's `elements` (a multiple of BLOCK) of fp32 `walks` times: read, write, or copy them.

    `source` and `target` hold `elements` a program; where nothing is written, `target` gets BLOCK sums a program,
    or the compiler would drop the loads.
    """
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    own = program * elements
    total = tl.zeros([BLOCK], tl.float32)
    for turn in range(walks):
        for start in range(0, elements, BLOCK):
            at = own + start + lane
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
    """Walks of one way and shape."""

    walk: Callable[[int], object]
    """Launches a kernel of so many walks."""
    nbytes: int
    """Read and written by one walk of all programs."""


def cache_walkers(device: torch.device, cache_bytes: int) -> dict[str, list[Walker]]:
    """For each of `WAYS` a walker of each shape, over random fp32 within a cache of `cache_bytes`."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return {way: [_walker(device, cache_bytes, sms, way, shape) for shape in SHAPES] for way in WAYS}


def _walker(device: torch.device, cache_bytes: int, sms: int, way: str, shape: Shape) -> Walker:
    reads, writes = WAYS[way]
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
