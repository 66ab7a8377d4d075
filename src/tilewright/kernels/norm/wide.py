"""Backward of rows that take a thread block or more, and do not all begin on a line: `backward_wide.cu`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tilewright.kernels import nvrtc
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
SIGNATURE = "PPPPPPPPqiqqqi"
LINE = 128
"""Bytes. Rings (`ring.cuh`) are as fast where all rows begin on their multiples."""
LEAST = 256
"""Vectors of a row: fewer are for rings, too."""
VECTORS, WARPS = 4, 16
"""Of a thread, and of a multiprocessor: with 16 warps each thread has 128 registers."""
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
    shared_bytes: int

    @property
    def block_threads(self) -> int:
        """With the warps that fetch and tell."""
        return self.threads + 32 * _helpers(self.share)

    def definitions(self) -> tuple[tuple[str, int], ...]:
        """What the source wants to know."""
        names = ("threads", "share", "count", "rows", "blocks")
        return *((name.upper(), getattr(self, name)) for name in names), ("VECTORS", VECTORS)


def _helpers(share: int) -> int:
    return 2 if share > 1 else 1


@functools.cache
def plan(columns: int, itemsize: int, inputs: int, weight_size: int) -> Wide | None:
    """For rows of so many columns of `inputs` tensors, weights of `weight_size` bytes (0: none); None if rings are."""
    vectors = needed(columns, itemsize)
    if vectors < LEAST or columns * itemsize % LINE == 0:
        return None
    fits = (_of_share(share, -(-vectors // share), inputs, weight_size * VECTOR // itemsize) for share in CLUSTERS)
    return next((found for found in fits if found), None)


def _of_share(share: int, count: int, inputs: int, weight_bytes: int) -> Wide | None:
    threads = -(-count // (VECTORS * 32)) * 32
    warps = threads // 32 + _helpers(share)
    # Clusters of several blocks a multiprocessor are no faster than of one.
    for blocks in range(WARPS // warps if share == 1 else min(1, WARPS // warps), 0, -1):
        room = min(LARGEST_BLOCK_BYTES, SHARED_BYTES // blocks - BLOCK_OVERHEAD) - DESK_BYTES
        rows = min(MOST_ROWS, (room - count * weight_bytes) // (inputs * count * VECTOR))
        if rows >= LEAST_ROWS:
            return Wide(threads, share, count, rows, blocks, count * (rows * inputs * VECTOR + weight_bytes))
    return None


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


def launch(
    chosen: Wide,
    definitions: nvrtc.Definitions,
    x: Tensor,
    dy: Tensor,
    dsum: Tensor | None,
    dx: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    sums: int,
) -> Tensor:
    """dx of matrices [rows, columns], and what the programs found for each column: fp32 [sums, slots, columns].

    `definitions` is what the source wants to know beside `chosen` and PERIOD.
    """
    rows, columns = x.shape
    strides = [0 if matrix is None else matrix.stride(0) if rows > 1 else columns for matrix in (x, dy, dsum)]
    period = period_of(strides[0] * x.itemsize) if rows > 1 else 1
    kernel, at_once = _kernel(x.device.index, chosen, (*definitions, ("PERIOD", period)))
    programs = min(rows, at_once)
    slots = programs + period - 1
    # Not every slot is written where programs go from one class of rows to the next.
    room = torch.zeros if period > 1 else torch.empty
    partial = room((sums, slots, columns), dtype=torch.float32, device=x.device)
    pointers = [0 if tensor is None else tensor.data_ptr() for tensor in (x, dy, dsum, dx, weight, mean, rstd, partial)]
    kernel((programs * chosen.share,), *pointers, rows, columns, *strides, slots)
    return partial
