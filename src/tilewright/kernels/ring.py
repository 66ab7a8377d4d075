"""How long rows lie on the rings of `ring.cuh`: threads, clusters, slots; arithmetic only."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

VECTOR = 16
"""Bytes that a thread loads at once."""
SHARED_BYTES = 228 * 1024
"""Of a multiprocessor (compute capability 9.0); every block takes `BLOCK_OVERHEAD` more than it asks for."""
BLOCK_OVERHEAD = 1024
LARGEST_BLOCK_BYTES = 227 * 1024
CLUSTERS = (1, 2, 4, 8, 16)
SHORT_THREADS = 256
"""Threads of a block whose rows lie within warps."""


@dataclass(frozen=True)
class Ring:
    """A build: the names are those of `ring.cuh`; `kept` of the row's weights lie beside the slots."""

    threads: int
    width: int
    vectors: int
    cluster: int
    blocks: int
    depth: int
    lag: int
    kept: int
    shared_bytes: int

    @property
    def groups(self) -> int:
        """Rows of a program at a time."""
        return self.threads // self.width

    def definitions(self) -> tuple[tuple[str, int], ...]:
        """What `ring.cuh` wants to know."""
        names = ("threads", "width", "vectors", "cluster", "blocks", "depth", "lag", "kept")
        return tuple((name.upper(), getattr(self, name)) for name in names)


@dataclass(frozen=True)
class Task:
    """Rows of `needed` vectors, at the worst place where they can begin; tensors read; bytes that a warp tells the
    others of a row; weights read beside them, and the bytes of one for a vector."""

    needed: int
    inputs: int
    state_bytes: int
    weights: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True)
class Way:
    """Vectors of a row a thread, threads a block at most, warps a multiprocessor (they bound the registers), slots."""

    vectors: int
    threads: int = 512
    warps: int = 16
    depth: int = 24


@functools.cache
def plan(task: Task, ways: tuple[Way, ...]) -> Ring | None:
    """The first way that holds the rows, with its weights in shared memory if they fit; None if none does."""
    return next(
        (found for way in ways for kept in dict.fromkeys((task.weights, 0)) if (found := _by(task, way, kept))), None
    )


def _by(task: Task, way: Way, kept: int) -> Ring | None:
    cluster = next((size for size in CLUSTERS if -(-task.needed // (way.vectors * size)) <= way.threads), None)
    if cluster is None:
        return None
    width = _width(-(-task.needed // (way.vectors * cluster)))
    threads = SHORT_THREADS if width <= 32 else width
    most = max(1, 32 * way.warps // threads)
    return next(
        (found for blocks in range(most, 0, -1) if (found := _ring(task, way, width, cluster, blocks, kept))), None
    )


def _width(least: int) -> int:
    """Threads for a block's share of a row: a power of two within a warp, whole warps beyond."""
    return 1 << (least - 1).bit_length() if least <= 32 else -(-least // 32) * 32


def _ring(task: Task, way: Way, width: int, cluster: int, blocks: int, kept: int) -> Ring | None:
    """With as many slots as there is room for; None where those are too few to read ahead: two, or one if that keeps
    the weights in shared memory."""
    threads = SHORT_THREADS if width <= 32 else width
    room = min(LARGEST_BLOCK_BYTES, SHARED_BYTES // blocks - BLOCK_OVERHEAD)
    weights = kept * way.vectors * threads * task.weight_bytes
    # What `Mail` takes, in 128 bytes each: slots and arrivals of two rows, of four with a lag.
    mails = [-(-sets * (cluster * (threads // 32) * task.state_bytes + 16) // 128) * 128 for sets in (2, 4)]
    slot = task.inputs * threads * VECTOR
    depths = [min(way.depth, (room - weights - mail) // slot) for mail in mails]
    lag = int(width > 32 and depths[1] >= 2 * way.vectors + 2)
    depth = depths[lag]
    if depth < way.vectors + (1 if kept and blocks == 1 else 2):
        return None
    return Ring(threads, width, way.vectors, cluster, blocks, depth, lag, kept, depth * slot + weights)


def needed(columns: int, itemsize: int) -> int:
    """Vectors that a row of a contiguous tensor takes, at the worst place where it can begin."""
    lanes = VECTOR // itemsize
    return -(-(columns + (lanes - 1 if columns % lanes else 0)) // lanes)


def alike(columns: int, tensors: Sequence[tuple[int, int, int]], itemsize: int) -> bool:
    """Whether rows of tensors (address, rows, elements from row to row) lie within 16 bytes as those of a result."""
    return not any(
        start % VECTOR or (rows > 1 and (stride - columns) * itemsize % VECTOR) for start, rows, stride in tensors
    )


def period_of(pitch_bytes: int) -> int:
    """After how many rows of that pitch a row begins at the same place within 16 bytes."""
    return VECTOR // math.gcd(VECTOR, pitch_bytes)


def programs_of(resident: int, tiles: int, groups: int, period: int) -> int:
    """Programs to launch: as many as run at once, in steps that bring every thread to rows of one beginning."""
    step = period // math.gcd(period, groups)
    return max(step, min(resident, -(-tiles // step) * step) // step * step)
