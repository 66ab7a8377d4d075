"""How rows of a length lie on the threads and blocks of the CUDA C++ kernels; arithmetic only.

The names are those of `held.cu`, `streamed.cu` and `ring.cuh`, whose definitions the plans give.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tilewright.kernels.ring import CLUSTERS, LARGEST_BLOCK_BYTES, VECTOR, Task, Way, needed

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class Held:
    """A build of `held.cu`: threads of a block, threads of it that share a row, vectors a thread."""

    threads: int
    width: int
    vectors: int
    cluster: int = 1
    shared_bytes: int = 0

    @property
    def groups(self) -> int:
        """Rows of a program at a time."""
        return self.threads // self.width

    def definitions(self) -> tuple[tuple[str, int], ...]:
        """What the source wants to know."""
        return ("THREADS", self.threads), ("WIDTH", self.width), ("VECTORS", self.vectors)


HELD_STEPS = ((256, 32), (512, 64), (1024, 128), (2048, 256), (4096, 512))
"""Up to so many vectors: threads of a block."""


def held(vectors: int) -> Held | None:
    """For rows of so many vectors; None if no block holds such a row in registers."""
    if vectors <= 64:
        width = next((width for width in (1, 2, 4, 8, 16) if 4 * width >= vectors), 32)
        return Held(128, width, max(1, -(-vectors // width)))
    for most, width in HELD_STEPS:
        if vectors <= most:
            return Held(max(128, width) if width <= 32 else width, width, -(-vectors // width))
    return None


LINE = 128
"""Bytes whose multiples the vectors of streamed rows are counted from."""


@dataclass(frozen=True)
class Streamed:
    """A build of `streamed.cu`; the names are those of its source. A program takes one row at a time."""

    threads: int
    cluster: int
    vectors: int
    full: int
    rows: int
    lag: int
    held: int
    shared_bytes: int
    groups: int = 1

    def definitions(self) -> tuple[tuple[str, int], ...]:
        """What the source wants to know."""
        names = ("threads", "cluster", "vectors", "full", "rows", "lag", "held")
        given = tuple((name.upper(), getattr(self, name)) for name in names)
        return *given, ("WIDTH", self.threads), ("BLOCKS", 1)


STREAMED_WAYS = ((9, 384), (8, 512))
"""Vectors a thread and threads a block at most, of which the smaller cluster is taken: clusters of 2 fill the device,
of 4 and 8 leave 12 of 132 multiprocessors idle, of 16 20. With 384 threads the nine have 168 registers each."""
ADDED_WAYS = ((4, 512), (8, 512))
"""With a residual, whose rows take slots too."""
MOST_ROWS = 6
WEIGHT_REGISTERS = 72
"""Of a thread, that hold weights and biases."""


def streamed(
    columns: int, itemsize: int, ragged: bool, weights: int, weight_size: int, residual: bool
) -> Streamed | None:
    """For rows of `columns` elements, if `ragged` in vectors counted from a line's beginning; None if no cluster
    holds one."""
    lanes = VECTOR // itemsize
    count = -(-(columns + (LINE // itemsize - 1 if ragged else 0)) // lanes)
    ways = ADDED_WAYS if residual else STREAMED_WAYS
    fits = [
        (cluster, vectors)
        for vectors, most in ways
        if (cluster := next((size for size in CLUSTERS if -(-count // (vectors * size)) <= most), None)) is not None
    ]
    if not fits:
        return None
    cluster, vectors = fits[0] if residual else min(fits, key=lambda fit: fit[0])
    threads = -(-count // (vectors * cluster * 32)) * 32
    slot = vectors * threads * VECTOR
    # What `Mail` takes: two states of 8 bytes from all warps of a cluster, and arrivals, four times each.
    slots = (LARGEST_BLOCK_BYTES - 4 * (cluster * (threads // 32) * 16 + 32)) // slot
    # A residual has `rows - lag` slots, its rows being done with when they are added.
    rows = min(MOST_ROWS, (slots + 1) // 2 if residual else slots)
    lag = int(rows >= (2 if residual else 3))
    registers = vectors * lanes * weight_size // 4
    held = min(weights, WEIGHT_REGISTERS // registers)
    used = rows + (rows - lag if residual else 0)
    full = min(vectors, columns // lanes // (threads * cluster))
    return Streamed(threads, cluster, vectors, full, rows, lag, held, used * slot)


def streams(at_once: int, rows: int, pitch_bytes: int) -> tuple[int, int]:
    """Programs of `streamed.cu` to launch for rows `pitch_bytes` apart, and its `period`.

    Rows that begin alike after `period` rows are taken in turn by as many programs as run at once, in a multiple of
    `period` if that costs few of them; else (a period above 1) each takes its share of rows that begin alike.
    """
    period = LINE // math.gcd(LINE, pitch_bytes)
    alike = at_once // period * period
    if rows <= at_once:
        return rows, 1
    return (alike, 1) if 20 * alike >= 19 * at_once else (at_once, period)


def task_of(columns: int, itemsize: int, inputs: int, weights: int, weight_size: int, centered: bool) -> Task:
    """Backward, of rows of `columns` elements that go through rings, `inputs` tensors of them and `weights` beside."""
    return Task(needed(columns, itemsize), inputs, 8 if centered else 4, weights, weight_size * 16 // itemsize)


def ways_of(columns: int, itemsize: int, sums: int) -> tuple[Way, ...]:
    """How rows may go through rings, the fastest of those measured on an H200 first; `sums` over rows: 0, 1 or 2."""
    vectors, ragged = needed(columns, itemsize), columns * itemsize % 16 != 0
    if ragged:
        return Way(4, 256), Way(4), Way(8)
    if columns % 256:
        return Way(4), Way(8)
    # Sums over rows of two columns a register pair are what bounds the registers of a 16-bit layer norm.
    if vectors <= (2048 if sums == 2 and itemsize == 2 else 8192):
        return Way(2), Way(4), Way(8)
    return (Way(4, 256), Way(4), Way(8)) if vectors <= 8192 else (Way(4), Way(8))
