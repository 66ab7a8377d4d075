"""The launch of the CUDA C++ kernel of `scatter_sums`, and which rows share a pass over the index."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from itertools import pairwise
from math import prod
from pathlib import Path

import torch

from tilewright.kernels.row import ELEMENTS
from tilewright.launch import nvrtc
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe

SOURCE = Path(__file__).parent / "scatter.cu"
INDICES = {torch.int64: "long long", torch.int32: "int"}
WARPS = 8
"""Warps of a block; each takes a row of the index."""
WIDTH = 64
"""Columns of a tile if neighbours in memory belong to different rows (ACROSS)."""
SHARED_BYTES = 64 * 1024
"""The most bytes of a block's sums, so that a multiprocessor holds three blocks."""
MOST = 4096
"""The most elements of a result's row: shared memory holds one row per warp."""
GRID = 65535
"""Blocks along the grid's second axis."""


def recipe(call: RecipeBuilder, source: Operand, index: Operand, extent: int) -> Recipe | None:
    """The sums of source at index, both [*, K]; None for a dtype or an extent that the kernel does not support.

    Leading dimensions along which the index is expanded become `heads`, which share passes over the index.
    """
    if extent > MOST or index.dtype not in INDICES or not source.dim():
        return None
    heads_to = _shared(index)
    if _merged(index.shape[heads_to:-1], index.strides[heads_to:-1]) is None:
        index, heads_to = call.copy(index), 0
    if any(_merged(source.shape[part], source.strides[part]) is None for part in _parts(heads_to)):
        source = call.copy(source)
    heads, rows = (prod(source.shape[part]) for part in _parts(heads_to))
    head, row = (_merged(source.shape[part], source.strides[part]) or 0 for part in _parts(heads_to))
    across = _lies_across(source, rows, head, row)
    if not across and source.stride(-1) != 1:
        source = call.copy(source)
        head, row = (_merged(source.shape[part], source.strides[part]) or 0 for part in _parts(heads_to))
    group = next(g for g in (4, 2, 1) if g == 1 or (g <= heads and WARPS * g * extent * 4 <= SHARED_BYTES))
    if -(-heads // group) > GRID:
        return None
    out = call.empty((*source.shape[:-1], extent), source.dtype)
    tile = group * WARPS * WIDTH * source.itemsize if across else 0
    kernel = _kernel(source.device.index, source.dtype, index.dtype, group, across, WARPS * group * extent * 4 + tile)
    call.launch(
        kernel, (-(-rows // WARPS), -(-heads // group)),
        source, index, out, heads, rows, source.shape[-1], extent, head, row, source.stride(-1),
        _merged(index.shape[heads_to:-1], index.strides[heads_to:-1]) or 0, index.stride(-1),
    )  # fmt: skip
    return call.finish(out)


@functools.cache
def _kernel(
    device: int, dtype: torch.dtype, index: torch.dtype, group: int, across: bool, shared_bytes: int
) -> nvrtc.Kernel:
    return nvrtc.kernel(
        SOURCE, "scatter_sums", "PPPiiiiqqqqq", device=device, threads=32 * WARPS, shared_bytes=shared_bytes,
        definitions=definitions(dtype, index, group, across),
    )  # fmt: skip


def definitions(dtype: torch.dtype, index: torch.dtype, group: int, across: bool) -> nvrtc.Definitions:
    """The macros that the source reads."""
    return (("ELEMENT", ELEMENTS[dtype]), ("INDEX", INDICES[index]), ("GROUP", group), ("ACROSS", int(across)))


def _shared(index: Operand) -> int:
    """The number of leading dimensions along which the index repeats."""
    lead = zip(index.shape[:-1], index.strides[:-1], strict=True)
    return next((d for d, (size, stride) in enumerate(lead) if size > 1 and stride), index.dim() - 1)


def _parts(heads_to: int) -> tuple[slice, slice]:
    """The dimensions of the heads and those of the rows."""
    return slice(0, heads_to), slice(heads_to, -1)


def _merged(shape: Sequence[int], strides: Sequence[int]) -> int | None:
    """The stride of these dimensions merged into one; None if they cannot be merged."""
    kept = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size > 1]
    if any(a != n * b for (_, a), (n, b) in pairwise(kept)):
        return None
    return kept[-1][1] if kept else 0


def _lies_across(source: Operand, rows: int, head: int, row: int) -> bool:
    """Whether the rows are the contiguous dimension, with vectors of eight rows' elements aligned to 16 bytes."""
    places = (head * source.itemsize, source.stride(-1) * source.itemsize, source.data_ptr())
    return row == 1 and source.stride(-1) != 1 and rows % WARPS == 0 and not any(place % 16 for place in places)
