"""Backward of rows that take a thread block or more: `backward_wide.cu`, where it is faster than rings."""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.kernels import nvrtc
from tilewright.kernels.norm.operands import Operands
from tilewright.kernels.ring import (
    BLOCK_OVERHEAD,
    CLUSTERS,
    LARGEST_BLOCK_BYTES,
    SHARED_BYTES,
    VECTOR,
    needed,
    period_of,
)

SOURCE = Path(__file__).parent / "backward_wide.cu"
SIGNATURE = "PPPPPPPPPqiqqqii"
LINE = 128
"""Bytes on whose multiples rows may all begin."""
LEAST = 256
"""Vectors of a row: fewer are for rings (`ring.cuh`)."""
LEAST_LINED = {0: 8192, 1: 8192, 2: 512}
"""The same of rows of 16 bits that all begin on lines, by the sums over rows that are wanted. Of 32 bits all are."""
ALONE, ALONE_LINED, TOGETHER = (4, 16), (2, 18), ((2, 28), (5, 16))
"""Vectors of a thread, and warps of a multiprocessor: where a block has a row alone, also of rows that begin on lines,
and where several have one of 16 bits. 16 warps have registers for five vectors, 28 for two."""
LEAST_ROWS, MOST_ROWS = 3, 8
"""In the ring of a block: one for each pass, and at least one on its way."""
DESK_BYTES = 2048
"""More than what the threads of a block tell each other takes."""


@dataclass(frozen=True)
class Wide:
    """A build: the names are those of `backward_wide.cu`."""

    threads: int
    share: int
    count: int
    rows: int
    blocks: int
    vectors: int
    bulk: int
    shared_bytes: int

    @property
    def block_threads(self) -> int:
        """With the warps that fetch and tell."""
        return self.threads + 32 * _helpers(self.share)

    def definitions(self) -> tuple[tuple[str, int], ...]:
        """What the source wants to know."""
        names = ("threads", "share", "count", "rows", "blocks", "vectors", "bulk")
        return tuple((name.upper(), getattr(self, name)) for name in names)


def _helpers(share: int) -> int:
    return 2 if share > 1 else 1


@functools.cache
def plan(columns: int, itemsize: int, inputs: int, weight_size: int, sums: int) -> Wide | None:
    """For rows of so many columns of `inputs` tensors, weights of `weight_size` bytes (0: none) and 0, 1 or 2 sums over
    rows; None if they are for rings."""
    vectors, lined = needed(columns, itemsize), columns * itemsize % LINE == 0
    if vectors < (LEAST_LINED[sums] if lined else LEAST) or (lined and itemsize != 2):
        return None
    together = TOGETHER if itemsize == 2 else (ALONE,)
    ways = [(ALONE_LINED if lined else ALONE, 1)] + [(way, share) for way in together for share in CLUSTERS[1:]]

    def by(way: tuple[int, int], share: int) -> Wide | None:
        return _by(way, share, -(-vectors // share), lined, inputs, weight_size * VECTOR // itemsize)

    return next(filter(None, itertools.starmap(by, ways)), None)


def _by(way: tuple[int, int], share: int, count: int, lined: bool, inputs: int, weight_bytes: int) -> Wide | None:
    vectors, most = way
    threads = -(-count // (vectors * 32)) * 32
    warps = threads // 32 + _helpers(share)
    # Clusters of several blocks a multiprocessor are no faster than of one.
    for blocks in range(most // warps if share == 1 else min(1, most // warps), 0, -1):
        room = min(LARGEST_BLOCK_BYTES, SHARED_BYTES // blocks - BLOCK_OVERHEAD) - DESK_BYTES
        rows = min(MOST_ROWS, (room - count * weight_bytes) // (inputs * count * VECTOR))
        if rows >= LEAST_ROWS:
            used = count * (rows * inputs * VECTOR + weight_bytes)
            return Wide(threads, share, count, rows, blocks, vectors, int(lined), used)
    return None


@functools.lru_cache(256)
def segments(rows: int, programs: int, period: int) -> int:
    """How many there are (`shares.cuh`): one begins where a program does, and where a class of rows does."""
    begins = {
        number * (rows // parts) + min(number, rows % parts) for parts in (programs, period) for number in range(parts)
    }
    return len(begins - {rows})


@functools.cache
def _kernel(device: int, chosen: Wide, definitions: nvrtc.Definitions) -> tuple[nvrtc.Kernel, int]:
    """The kernel and the programs that run at once."""
    kernel = nvrtc.kernel(
        SOURCE,
        "norm_backward_wide",
        SIGNATURE,
        device=device,
        threads=chosen.block_threads,
        shared_bytes=chosen.shared_bytes,
        cluster=chosen.share,
        definitions=(*chosen.definitions(), *definitions),
    )
    return kernel, kernel.programs_at_once()


def launch(chosen: Wide, definitions: nvrtc.Definitions, operands: Operands, sums: int) -> tuple[Tensor, Tensor]:
    """dx, and what the programs found for each column: fp32 [sums, slots, columns and more] and, int32 [slots], where
    column 0 is.

    `definitions` is what the source wants to know beside `chosen` and PERIOD.
    """
    x = operands.x
    rows, columns = x.shape
    strides = operands.strides()
    period = period_of(strides[0] * x.itemsize) if rows > 1 else 1
    kernel, at_once = _kernel(x.device.index, chosen, (*definitions, ("PERIOD", period)))
    programs = min(rows, at_once)
    slots = segments(rows, programs, period)
    pitch = needed(columns, x.itemsize) * (VECTOR // x.itemsize)
    partial = torch.empty((sums, slots, pitch), dtype=torch.float32, device=x.device)
    heads = torch.empty(slots, dtype=torch.int32, device=x.device)
    results = partial.data_ptr(), heads.data_ptr()
    kernel((programs * chosen.share,), *operands.pointers(), *results, rows, columns, *strides, slots, pitch)
    return partial, heads
