"""Nests that a merge must not make: they reduce with a stride, or in few programs."""

from __future__ import annotations

import torch

from tilewright.loops.lower import FEW_ROWS, LONG_ROW, Lowered
from tilewright.loops.nest import Level

STRIDED_BYTES = 64 * 1024
"""A nest may read a smaller tensor with a stride, since it stays in a cache."""
SECTOR_COLUMNS = 4096
"""With longer rows a program cannot hold the 16 rows whose 16-bit elements share a 32-byte sector."""
TILE_COLUMNS = 256
MANY_ROWS = 2**16
"""A program of a GPU holds so few columns of the rows of a sector, and so many rows make enough programs. An RMS norm
over the second axis of 112 x 64 x 512 x 512 in fp32 takes 3,970 µs on an H200 in one kernel, 5,800 in two."""


def strides(lowered: Lowered) -> bool:
    """Whether a nest that reduces accesses the columns of a large tensor with a stride, its rows being contiguous.

    On a GPU this concerns sums over columns, and stores of long rows: a batch norm of 128 channels fused with the copy
    that makes them the last axis took 56 µs for 16 × 32 × 32 in bf16 (H200), since 32 programs each wrote four elements
    of a sector.
    """
    nest = lowered.nest
    reductions = ("reduce_cols", "reduce_rows") if lowered.language == "c++" else ("reduce_cols",)
    if not nest.rows or not any(step.name in reductions for step in nest.steps):
        return False
    if lowered.language == "triton" and nest.col_count <= TILE_COLUMNS and nest.row_count >= MANY_ROWS:
        return False
    accesses = [step.access for step in nest.steps if step.access and step.level is Level.FULL]
    if lowered.language == "triton" and nest.col_count > SECTOR_COLUMNS:
        accesses += [store.access for store in nest.stores if any(nest.split(store.access.strides)[1])]
    for access in accesses:
        buffer = nest.buffers[access.buffer]
        rows, cols = nest.split(access.strides)
        small = buffer.elements * getattr(torch, buffer.dtype).itemsize < STRIDED_BYTES
        if 1 in rows and 1 not in cols and not small:
            return True
    return False


def starves(lowered: Lowered) -> bool:
    """Whether a GPU would run few programs that each reduce a long row."""
    nest = lowered.nest
    long = lowered.language == "triton" and nest.row_count <= FEW_ROWS and nest.col_count >= LONG_ROW
    return long and any(step.name == "reduce_cols" for step in nest.steps)
