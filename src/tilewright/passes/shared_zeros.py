"""Zeros in which programs of a kernel count each other: one tensor for all calls of a graph, left as it was."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_known

aten: Any = torch.ops.aten
MARK = "tilewright_zeros"
"""Metadata key of such zeros: how many there are."""
LEAST = 4096


def shared_zeros(like: fx.Node, count: int) -> fx.Node:
    """int32 zeros, `count` at least, at the begin of the graph of `like` and on its device."""
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
