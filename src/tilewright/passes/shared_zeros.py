"""Recognises calls that make tensors of zeros; makes one tensor of zeros per graph for the kernels' counters."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_known

aten: Any = torch.ops.aten
MARK = "tilewright_zeros"
"""Metadata key of the shared zeros; its value is their number."""
LEAST = 4096
ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)
ONES = (aten.new_ones.default, aten.ones.default, aten.ones_like.default)
FILLED = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}
"""By operator, the index of the argument that is the fill value."""


def is_zeros(node: object) -> bool:
    """Whether a call makes a tensor of zeros."""
    return is_filled(node, 0)


def is_filled(node: object, number: int) -> bool:
    """Whether a call makes a tensor whose elements are all `number`, 0 or 1."""
    if not isinstance(node, fx.Node):
        return False
    place = FILLED.get(node.target)
    return node.target in (ONES if number else ZEROS) if place is None else bool(node.args[place] == number)


def shared_zeros(like: fx.Node, count: int) -> fx.Node:
    """At least `count` int32 zeros on the device of `like`, made at the start of its graph."""
    graph = like.graph
    for node in graph.nodes:
        if node.meta.get(MARK, 0) >= count:
            return node  # type: ignore[no-any-return]
    value: Any = calls.outputs(like)[0]
    size = max(LEAST, 1 << (count - 1).bit_length())
    options: dict[str, Any] = {"dtype": torch.int32, "device": value.device, "pin_memory": False}
    with value.fake_mode:
        zeros = torch.full([size], 0, **options)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    made = insert_known(first, aten.full.default, zeros, [size], 0, **options)
    made.meta[MARK] = size
    return made
