"""How rows of a length lie on the threads, blocks and clusters of the CUDA C++ kernels; arithmetic only.

The names are those of `stream.cuh`, whose definitions `Geometry.definitions` gives.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass

VECTOR_BYTES = 16
SHAPES = ((4, 8, 256), (8, 8, 256), (4, 16, 256), (8, 16, 256), (4, 16, 512), (8, 16, 512))
"""(vectors a thread, blocks a cluster at most, threads for a row at most), tried in turn."""
BLOCK_LANES = 256
"""Threads that a block has at least, where rows are short enough to share it."""
DIRECT_VECTORS, DIRECT_LANES = 4, 512
"""Vectors a thread and threads a row, at most, of `direct.cu`."""
DIRECT_THREADS = 512
"""Threads that its blocks have, where rows are short enough to share one."""
DIRECT_RESIDENT = 1024
"""Threads of its blocks on a multiprocessor, at 64 registers each."""
DIRECT_SHARED_BYTES = 2048
LARGEST_OWNED = 32
"""Columns a thread owns at most: with 64 partial sums of a layer norm it just stays within its registers."""
SHARED_BYTES = 228 * 1024
"""Of a multiprocessor (compute capability 9.0); every block takes `BLOCK_OVERHEAD` more than it asks for."""
BLOCK_OVERHEAD = 1024
LARGEST_BLOCK_BYTES = 227 * 1024
LARGEST_DEPTH = 12
"""Slots: beyond, nothing is gained by more bytes on their way."""


@dataclass(frozen=True)
class Geometry:
    """One build of a kernel, of `lanes` × `groups` threads."""

    lanes: int
    groups: int
    vectors: int
    chunk_vectors: int
    cluster: int
    blocks: int
    heads: int
    depth: int
    shared_bytes: int

    @property
    def threads(self) -> int:
        return self.lanes * self.groups

    def definitions(self) -> tuple[tuple[str, int], ...]:
        names = ("lanes", "groups", "vectors", "chunk_vectors", "cluster", "blocks", "heads", "depth", "shared_bytes")
        return tuple((name.upper(), getattr(self, name)) for name in names)


@functools.cache
def geometry(
    direction: str, columns: int, itemsize: int, period: int, inputs: int, weights: int, weight_size: int
) -> Geometry | None:
    """The build for rows of `columns` elements of `itemsize` bytes; None if no cluster holds such a row.

    `period` is the number of rows after which a row begins at the same place within 16 bytes; `inputs` the
    tensors read, `weights` (0, 1 or 2) those kept in shared memory, `weight_size` bytes an element.
    """
    width = VECTOR_BYTES // itemsize
    needed = _vectors_needed(columns, itemsize, period)
    for vectors, largest, most_lanes in SHAPES:
        cluster = next((2**k for k in range(5) if -(-needed // 2**k) <= most_lanes * vectors), largest + 1)
        owned = vectors * width
        if cluster > largest or owned > LARGEST_OWNED:
            continue
        lanes = _lanes(-(-needed // cluster), vectors)
        groups = max(1, BLOCK_LANES // lanes) if cluster == 1 else 1
        heads = min(groups, period)
        weight_bytes = heads * lanes * owned * weight_size
        for blocks in range(_warps(owned) // (lanes * groups // 32) or 1, 0, -1):
            for chunk in (vectors,) if groups > 1 else (vectors // 2, vectors // 4):
                fits = _ring(direction, lanes * groups, cluster, blocks, vectors, chunk, inputs, weights, weight_bytes)
                if fits:
                    return Geometry(lanes, groups, vectors, chunk, cluster, blocks, heads, *fits)
    return None


@functools.cache
def direct(columns: int, itemsize: int, period: int, centered: bool) -> Geometry | None:
    """The build of `direct.cu` for rows of `columns` elements; None if no block holds such a row."""
    lanes = _lanes(_vectors_needed(columns, itemsize, period), DIRECT_VECTORS)
    if lanes > DIRECT_LANES:
        return None
    # Two rows of a layer norm wait for each other at its two sums; at 256 threads each, apart is better.
    groups = 1 if centered and lanes >= BLOCK_LANES else max(1, DIRECT_THREADS // lanes)
    blocks = max(1, DIRECT_RESIDENT // (lanes * groups))
    return Geometry(lanes, groups, DIRECT_VECTORS, DIRECT_VECTORS, 1, blocks, 1, 1, DIRECT_SHARED_BYTES)


def _vectors_needed(columns: int, itemsize: int, period: int) -> int:
    """Vectors that a row takes, at the worst place where it can begin."""
    width = VECTOR_BYTES // itemsize
    return -(-(columns + (width - 1 if period > 1 else 0)) // width)


def _warps(owned: int) -> int:
    """Warps of a multiprocessor, given the registers that a thread takes: 80, or 128."""
    return 16 if owned > LARGEST_OWNED // 2 else 24


def _lanes(share: int, vectors: int) -> int:
    """Threads for a block's share of a row: a power of two within a warp, whole warps beyond."""
    least = max(1, -(-share // vectors))
    return 1 << (least - 1).bit_length() if least <= 32 else -(-least // 32) * 32


def _ring(
    direction: str,
    consumers: int,
    cluster: int,
    blocks: int,
    vectors: int,
    chunk: int,
    inputs: int,
    weights: int,
    weight_bytes: int,
) -> tuple[int, int] | None:
    """Slots and the block's bytes of shared memory; None where the slots are too few to read ahead."""
    room = min(LARGEST_BLOCK_BYTES, SHARED_BYTES // blocks - BLOCK_OVERHEAD)
    slot = inputs * VECTOR_BYTES * (consumers * chunk + (1 if chunk == vectors else 0))
    # Backward reads a row's slots twice before it gives them back.
    least = 2 if direction == "forward" else vectors // chunk + 1
    for depth in range(LARGEST_DEPTH, least - 1, -1):
        taken = sum(_memory(depth, consumers // 32, cluster, weights, weight_bytes)) + depth * slot
        if taken <= room:
            return depth, taken
    return None


def _memory(depth: int, warps: int, cluster: int, weights: int, weight_bytes: int) -> Iterator[int]:
    """Of `Memory` in `stream.cuh`, what precedes the slots: barriers and sums handed over, weight, bias."""
    for size in (
        8 * (2 * depth + 2) + 16 * warps + 16 * cluster,
        weight_bytes if weights > 0 else VECTOR_BYTES,
        weight_bytes if weights > 1 else VECTOR_BYTES,
    ):
        yield -(-size // 128) * 128


def period_of(pitch_bytes: int) -> int:
    """After how many rows of that pitch a row begins at the same place within 16 bytes."""
    return VECTOR_BYTES // math.gcd(VECTOR_BYTES, pitch_bytes)


def programs_of(resident: int, tiles: int, groups: int, period: int) -> int:
    """Programs to launch: as many as run at once, in steps that bring every thread to rows of one head."""
    step = period // math.gcd(period, groups)
    return max(step, min(resident, -(-tiles // step) * step) // step * step)
