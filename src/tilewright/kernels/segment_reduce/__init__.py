"""The gradient of an embedding: deterministic sums of rows by sorted index; and other reductions of such rows.

    sorted_bounds(keys, entries)                               int64 [entries + 1]: how many keys are less than e
    embedding_sums(dout, keys, order, bounds, entries, padding)
                                                               [entries, D]: in row e, Σ dout[order[i]] over keys[i] = e
    add_embedding_sums_(table, dout, keys, order, bounds, padding)
                                                               the same, added to the dense table [entries, D]
    row_extremes(rows, keys, order, bounds, entries, largest, start, include)
                                                               [entries, D]: the maximum (or minimum) of
                                                               rows[order[i]] over keys[i] = e; `start` without such
                                                               rows; with `include`, `start` takes part, too
    matching_sums(other, own, rows, keys, order, bounds)       [entries, D]: in row e, Σ rows[order[i]] over keys[i] = e
                                                               where other[order[i]] equals own[e] (without rows: their
                                                               number); the gradient of such an extreme

keys: the sorted indices, of 8 to 32 bits, each in [0, entries). order: for each key its row of dout [*, D], usually the
position before the sort. bounds: `sorted_bounds` of the keys. Row `padding` gets no sum (-1: all do). An extreme is NaN
if a row is. fp32, bf16 and fp16 run in Triton on a GPU and sum in fp32 in the order of the positions; others run in
PyTorch.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.kernels.by_recipe import by_triton
from tilewright.kernels.device import at_least_fp32, interpreted
from tilewright.kernels.registration import define
from tilewright.kernels.segment_reduce import triton
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe


def _bounds(keys: torch.Tensor, entries: int) -> torch.Tensor:
    if keys.numel() and not (int(keys[0]) >= 0 and int(keys[-1]) < entries):
        raise IndexError("index out of range of the sums")
    return torch.searchsorted(keys, torch.arange(entries + 1, dtype=keys.dtype, device=keys.device))


def _sums(
    dout: torch.Tensor, keys: torch.Tensor, order: torch.Tensor, bounds: torch.Tensor, entries: int, padding: int
) -> torch.Tensor:
    total = _summed(dout.flatten(0, -2)[order], keys, entries)
    if padding >= 0:
        total[padding] = 0
    return total


def _summed(rows: torch.Tensor, keys: torch.Tensor, entries: int) -> torch.Tensor:
    # PyTorch on a CPU accumulates in the table's dtype, which is inaccurate in 16 bits.
    wide = at_least_fp32(rows)
    return wide.new_zeros(entries, rows.shape[-1]).index_add_(0, keys.int(), wide).to(rows.dtype)


def _extremes(
    rows: torch.Tensor, keys: torch.Tensor, order: torch.Tensor, bounds: torch.Tensor, entries: int, largest: bool,
    start: float, include: bool,
) -> torch.Tensor:  # fmt: skip
    found, taken = rows.new_full((entries, rows.shape[-1]), start), rows[order]
    places = keys.long()[:, None].expand(taken.shape)
    return found.scatter_reduce_(0, places, taken, "amax" if largest else "amin", include_self=include)


def _matching(
    other: torch.Tensor, own: torch.Tensor, rows: torch.Tensor | None, keys: torch.Tensor, order: torch.Tensor,
    bounds: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    values = torch.ones_like(other) if rows is None else rows
    return _summed((other[order] == own[keys.int()]) * values[order], keys, own.shape[0])


def _bounds_recipe(call: RecipeBuilder, keys: Operand, entries: int) -> Recipe | None:
    return triton.bounds_recipe(call, keys, entries) if keys.is_cuda or interpreted() else None


def _add_sums(
    table: torch.Tensor, dout: torch.Tensor, keys: torch.Tensor, order: torch.Tensor, bounds: torch.Tensor, padding: int
) -> torch.Tensor:
    table.add_(_sums(dout, keys, order, bounds, table.shape[0], padding))
    return dout.new_empty(0)


def _fake(
    dout: torch.Tensor, keys: torch.Tensor, order: torch.Tensor, bounds: torch.Tensor, entries: int, *_: Any
) -> torch.Tensor:
    return dout.new_empty((entries, dout.shape[-1]))


define(
    "sorted_bounds",
    _bounds,
    lambda keys, entries: keys.new_empty((entries + 1,), dtype=torch.int64),
    recipe=_bounds_recipe,
)
define("embedding_sums", _sums, _fake, recipe=by_triton(triton.sums_recipe))
define(
    "add_embedding_sums_", _add_sums, lambda table, dout, *_: dout.new_empty(0), recipe=by_triton(triton.added_recipe)
)
define("row_extremes", _extremes, _fake, recipe=by_triton(triton.extremes_recipe))
define(
    "matching_sums",
    _matching,
    lambda other, own, *_: own.new_empty(own.shape),
    recipe=by_triton(triton.matching_recipe),
)
