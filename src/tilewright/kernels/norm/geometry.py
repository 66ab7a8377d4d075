"""How rows of a length lie on the threads and blocks of the CUDA C++ kernels; arithmetic only.

The names are those of `held.cu` and `ring.cuh`, whose definitions the plans give.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tilewright.kernels.ring import Task, Way, needed

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


def task_of(
    direction: Direction, columns: int, itemsize: int, inputs: int, weights: int, weight_size: int, centered: bool
) -> Task:
    """Rows of `columns` elements that go through rings, `inputs` tensors of them and `weights` beside."""
    forward = direction == "forward"
    passes = 3 if forward and centered else 2
    return Task(needed(columns, itemsize), inputs, 8 if centered else 4, weights, weight_size * 16 // itemsize, passes)


def ways_of(direction: Direction, columns: int, itemsize: int, sums: int, centered: bool) -> tuple[Way, ...]:
    """How rows may go through rings, the fastest of those measured on an H200 first; `sums` over rows: 0, 1 or 2."""
    vectors, ragged = needed(columns, itemsize), columns * itemsize % 16 != 0
    if direction == "forward":
        if not centered:
            return Way(4, depth=12), Way(8)
        return (Way(8), Way(4)) if ragged or (vectors > 16384 and itemsize == 2) else (Way(4), Way(8))
    if ragged:
        return Way(4, 256), Way(4), Way(8)
    if columns % 256:
        return Way(4), Way(8)
    # Sums over rows of two columns a register pair are what bounds the registers of a 16-bit layer norm.
    if vectors <= (2048 if sums == 2 and itemsize == 2 else 8192):
        return Way(2), Way(4), Way(8)
    return (Way(4, 256), Way(4), Way(8)) if vectors <= 8192 else (Way(4), Way(8))
