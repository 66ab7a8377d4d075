"""Whether a kernel may overwrite an operand with a result: it must write each element after its last read."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewright.loops.nest import Access, Level, Nest, Step
from tilewright.records.recipe import dense_strides


def same_storage_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both fill the same memory without gaps: contiguous in any shapes, or dense with the same strides."""
    if one.dtype != other.dtype or one.numel() != other.numel():
        return False
    same = one.shape == other.shape and one.stride() == other.stride() and _is_dense(one)
    return same or (one.is_contiguous() and other.is_contiguous())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no gaps, whatever the order of its axes."""
    axes = sorted(((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1), reverse=True)
    return [stride for stride, _ in axes] == list(dense_strides([size for _, size in axes]))


def writes_after_reads(nest: Nest, source: int, target: int, *, in_order: bool) -> bool:
    """Whether output `target` may share storage with input `source`: the last read of each element is in the pass over
    the columns that writes it, or earlier in the same row.

    `in_order`: one thread runs a row, and reads of row values precede a pass's stores.
    """
    stores = [n for n, store in enumerate(nest.stores) if store.access.buffer == len(nest.inputs) + target]
    stored = nest.stores[stores[0]].access
    if any(nest.steps[nest.stores[n].value].is_late for n in stores):
        return False
    stages, last = nest.store_stages(), nest.last_stages()
    for number, load in enumerate(nest.steps):
        if load.access is None or load.access.buffer != source:
            continue
        alike = replace(load.access, buffer=stored.buffer) == stored
        if not alike and not (in_order and _reads_own_row(nest, load, stored)):
            return False
        if load.where == "after" or last[number] > min(stages[n] for n in stores):
            return False
    # A program that reduces over columns owns whole rows. Otherwise the result must vary with every axis, or other
    # blocks would still read elements that one block overwrites.
    owned = nest.rows if any(s.name == "reduce_cols" for s in nest.steps) else nest.rows + nest.cols
    return all(stride or n == 1 for n, stride in zip(owned, stored.strides, strict=False))


def _reads_own_row(nest: Nest, load: Step, stored: Access) -> bool:
    """Whether a load reads, before the row's columns, one element of the same row of `stored` at a checked index."""
    access = load.access
    if access is None or load.level is not Level.ROW or len(access.by) != 1 or len(nest.cols) != 1:
        return False
    (rows, (column,)), index = nest.split(stored.strides), nest.steps[load.args[0]]
    inside = index.name == "check" and len(index.args) == 1 and index.constant == nest.cols[0]
    return inside and access.by == (column,) and access.strides == (*rows, 0) and access.offset == stored.offset
