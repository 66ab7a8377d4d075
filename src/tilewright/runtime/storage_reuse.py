"""Whether a kernel may write a result over an operand: each element after its last read."""

from __future__ import annotations

from dataclasses import replace

import torch

from tilewright.loops.nest import Access, Level, Nest, Step


def same_storage_layout(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether both fill the same memory without gaps: contiguous in any shapes, or dense with the same strides."""
    if one.dtype != other.dtype or one.numel() != other.numel():
        return False
    same = one.shape == other.shape and one.stride() == other.stride() and _is_dense(one)
    return same or (one.is_contiguous() and other.is_contiguous())


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no gaps, whatever the order of its axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride != expected:
            return False
        expected *= size
    return True


def writes_after_reads(nest: Nest, source: int, target: int, *, in_order: bool) -> bool:
    """Whether output `target` may share storage with input `source`: each element is read for the
    last time in the pass over the columns that writes it, or before by the row that it belongs to.

    `in_order`: one thread runs a row, all reads of a pass's beginning before its stores.
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
    # A program that reduces over columns owns whole rows; otherwise other blocks of a row still read what a narrow
    # result would overwrite, and other rows what one without rows would.
    owned = nest.rows if any(s.name == "reduce_cols" for s in nest.steps) else nest.rows + nest.cols
    return all(stride or n == 1 for n, stride in zip(owned, stored.strides, strict=False))


def _reads_own_row(nest: Nest, load: Step, stored: Access) -> bool:
    """Whether a load reads one element of its row of `stored`, at a checked index, before the row's columns."""
    access = load.access
    if access is None or load.level is not Level.ROW or len(access.by) != 1 or len(nest.cols) != 1:
        return False
    (rows, (column,)), index = nest.split(stored.strides), nest.steps[load.args[0]]
    inside = index.name == "check" and len(index.args) == 1 and index.constant == nest.cols[0]
    return inside and access.by == (column,) and access.strides == (*rows, 0) and access.offset == stored.offset
