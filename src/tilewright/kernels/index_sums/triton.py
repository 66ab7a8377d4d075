"""Sums at indices in Triton, by atomic additions to fp32 zeros.

`add_rows`: rows of at least `WIDE` columns, each with one index. A program has a tile of rows and sums the rows of one
index before it adds them, so that sorted or few indices cost one addition per tile. After two indices that occur once
in the tile, it adds the remaining rows one by one: without that, the unsorted edges of a graph (200,000 of 256 columns
to 20,000 nodes in bf16) took 727 µs.
`add_elements`: all others, one addition per element.
Limit: memory if rows are sorted, else atomic additions, some 300 per nanosecond on an H200.
"""
# mypy: allow-untyped-decorators, allow-subclassing-any

from __future__ import annotations

from math import prod

import torch
import triton
import triton.language as tl

from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe

WIDE = 96
"""The fewest columns of `add_rows`."""
COLUMNS = 256
"""Columns of a tile: 8 for each thread of a warp."""
TILE = 4096
"""Elements of a tile of rows: 128 for each thread."""
FEW = 64
"""With at most this many indices every tile sums the rows of each before it adds, since many tiles add to each."""
BLOCK = 1024
"""Elements of a program of `add_elements`."""


@triton.jit(do_not_specialize=["chunks"])
def add_rows(
    source: tl.tensor, index: tl.tensor, out: tl.tensor, chunks: tl.tensor, positions: tl.tensor, columns: tl.tensor,
    extent: tl.tensor, source_o: tl.int64, source_p: tl.int64, source_d: tl.int64, index_o: tl.int64, index_p: tl.int64,
    MOST_ALONE: tl.constexpr, WRAPS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
) -> None:  # fmt: skip
    """Program (o · chunks + chunk, c): out[o, index[o, p], column] += source[o, p, column] of `ROWS` positions p."""
    o = (tl.program_id(0) // chunks).to(tl.int64)
    place = tl.arange(0, ROWS)
    row = (tl.program_id(0) % chunks).to(tl.int64) * ROWS + place
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    key = tl.load(index + o * index_o + row * index_p, mask=row < positions, other=0).to(tl.int64)
    if WRAPS:
        key = tl.where(key < 0, key + extent, key)
    exists = (key >= 0) & (key < extent)
    tl.device_assert(exists, "index out of range of the sums")
    left = exists & (row < positions)
    values = tl.load(
        source + o * source_o + row[:, None] * source_p + column[None, :] * source_d,
        mask=left[:, None] & (column < columns)[None, :], other=0.0,
    ).to(tl.float32)  # fmt: skip
    first = tl.min(tl.where(left, place, ROWS), 0)
    alone = 0
    while (first < ROWS) & (alone < MOST_ALONE):
        entry = tl.max(tl.where(place == first, key, 0), 0)
        same = left & (key == entry)
        part = tl.sum(tl.where(same[:, None], values, 0.0), 0)
        tl.atomic_add(out + (o * extent + entry) * columns + column, part, mask=column < columns, sem="relaxed")
        alone += (tl.sum(same.to(tl.int32), 0) == 1).to(tl.int32)
        left = left & (key != entry)
        first = tl.min(tl.where(left, place, ROWS), 0)
    if first < ROWS:
        to = out + (o * extent + key[:, None]) * columns + column[None, :]
        tl.atomic_add(to, values, mask=left[:, None] & (column < columns)[None, :], sem="relaxed")


@triton.jit(do_not_specialize=["count"])
def add_elements(
    source: tl.tensor, index: tl.tensor, out: tl.tensor, count: tl.int64, extent: tl.tensor,
    source_o: tl.int64, source_p: tl.int64, source_d: tl.int64, index_o: tl.int64, index_p: tl.int64, index_d: tl.int64,
    POSITIONS: tl.constexpr, COLUMNS: tl.constexpr, WRAPS: tl.constexpr, NARROW: tl.constexpr, BLOCK: tl.constexpr,
) -> None:  # fmt: skip
    """out[o, index[o, p, d], d] += source[o, p, d] of `BLOCK` elements; `NARROW`: their numbers fit 32 bits."""
    element = tl.program_id(0).to(tl.int32 if NARROW else tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = element < count
    d = (element % COLUMNS).to(tl.int64)
    p = (element // COLUMNS % POSITIONS).to(tl.int64)
    o = (element // (COLUMNS * POSITIONS)).to(tl.int64)
    key = tl.load(index + o * index_o + p * index_p + d * index_d, mask=inside, other=0).to(tl.int64)
    if WRAPS:
        key = tl.where(key < 0, key + extent, key)
    exists = (key >= 0) & (key < extent)
    tl.device_assert(exists, "index out of range of the sums")
    value = tl.load(source + o * source_o + p * source_p + d * source_d, mask=inside, other=0.0).to(tl.float32)
    tl.atomic_add(out + (o * extent + key) * COLUMNS + d, value, mask=inside & exists, sem="relaxed")


def rows_of_tile(columns: int) -> int:
    """Rows of a tile of `add_rows`; 1 where `add_elements` runs."""
    return TILE // min(triton.next_power_of_2(columns), COLUMNS) if columns >= WIDE else 1


def recipe(call: RecipeBuilder, source: Operand, index: Operand, extent: int, wraps: bool) -> Recipe:
    """The sums [O, extent, D], fp32, of source at index, both [O, P, D]."""
    outer, positions, columns = source.shape
    out = call.empty((outer, extent, columns), torch.float32)
    if out.numel():
        call.fill(out, 0.0)
    count = prod(source.shape)
    checked = {"WRAPS": wraps, "debug": True, "sanitize_overflow": False}
    if not count or not out.numel():
        return call.finish(out)
    if columns >= WIDE and not index.strides[2]:
        rows = rows_of_tile(columns)
        wide, chunks = TILE // rows, triton.cdiv(positions, rows)
        call.launch(
            add_rows, (outer * chunks, triton.cdiv(columns, wide)), source, index, out, chunks, positions, columns,
            extent, *source.strides, *index.strides[:2], MOST_ALONE=2 if extent > FEW else rows, ROWS=rows,
            COLUMNS=wide, num_warps=1, **checked,
        )  # fmt: skip
    else:
        call.launch(
            add_elements, (triton.cdiv(count, BLOCK),), source, index, out, count, extent, *source.strides,
            *index.strides, POSITIONS=positions, COLUMNS=columns, NARROW=count < 2**31 - BLOCK, BLOCK=BLOCK,
            num_warps=4, **checked,
        )  # fmt: skip
    return call.finish(out)
