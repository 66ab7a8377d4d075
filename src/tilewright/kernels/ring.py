"""Schedules of rows that pass through the rings of `ring.cuh`: threads, clusters, stages; arithmetic only."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from tilewright.hardware.architectures import DeviceLimits
from tilewright.kernels.row import VECTOR
from tilewright.kernels.row_schedule import Schedule, cluster_of, room_of

SHORT_THREADS = 256
"""Threads of a block whose rows lie within warps."""


@dataclass(frozen=True)
class Task:
    """Rows of `needed` vectors; tensors read; bytes that a warp tells the others of a row; weights read beside them,
    and the bytes of one for a vector."""

    needed: int
    inputs: int
    state_bytes: int
    weights: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True)
class RingShape:
    """Vectors of a row a thread, threads a block at most, warps a multiprocessor (they bound the registers), stages."""

    vectors: int
    threads: int = 512
    warps: int = 16
    stages: int = 24


@functools.cache
def plan(task: Task, shapes: tuple[RingShape, ...], limits: DeviceLimits) -> Schedule | None:
    """The first shape that holds the rows, with its weights in shared memory if they fit; None if none does."""
    choices = ((shape, kept) for shape in shapes for kept in dict.fromkeys((task.weights, 0)))
    return next(filter(None, (_by_shape(task, shape, kept, limits) for shape, kept in choices)), None)


def _by_shape(task: Task, shape: RingShape, kept: int, limits: DeviceLimits) -> Schedule | None:
    cluster = cluster_of(task.needed, shape.vectors, shape.threads, limits)
    if cluster is None:
        return None
    row_threads = _row_threads(-(-task.needed // (shape.vectors * cluster)))
    threads = SHORT_THREADS if row_threads <= 32 else row_threads
    most = max(1, 32 * shape.warps // threads)
    tried = (_with_blocks(task, shape, row_threads, cluster, blocks, kept, limits) for blocks in range(most, 0, -1))
    return next(filter(None, tried), None)


def _row_threads(least: int) -> int:
    """Threads for a block's share of a row: a power of two within a warp, whole warps beyond."""
    return 1 << (least - 1).bit_length() if least <= 32 else -(-least // 32) * 32


def _with_blocks(
    task: Task, shape: RingShape, row_threads: int, cluster: int, blocks: int, kept: int, limits: DeviceLimits
) -> Schedule | None:
    """With as many stages as there is room for; None where those are too few to read ahead: two, or one if that keeps
    the weights in shared memory."""
    threads = SHORT_THREADS if row_threads <= 32 else row_threads
    weights = kept * shape.vectors * threads * task.weight_bytes
    # `ClusterReduce`, in 128 bytes each: states and barriers of two rows, of four with a lag.
    reductions = [-(-sets * (cluster * (threads // 32) * task.state_bytes + 16) // 128) * 128 for sets in (2, 4)]
    stage_bytes = task.inputs * threads * VECTOR
    room = room_of(blocks, limits) - weights
    counts = [min(shape.stages, (room - reduction) // stage_bytes) for reduction in reductions]
    lag = int(row_threads > 32 and counts[1] >= 2 * shape.vectors + 2)
    stages = counts[lag]
    if stages < shape.vectors + (1 if kept and blocks == 1 else 2):
        return None
    return Schedule(
        threads, row_threads, shape.vectors, cluster, blocks, "ring", stages, lag, kept,
        shared_bytes=stages * stage_bytes + weights,
    )  # fmt: skip
