"""Copies of small results back to inputs are joined into one call at the end of a graph.

    copy_(a, x); copy_(b, y); …              →   _foreach_copy_([a, b, …], [x, y, …])
    copy_(n, add(n, 1)); …                   →   _foreach_add_([n, …], 1)

A network of 53 batch norms in training writes 106 vectors and increments 53 counters: 212 launches.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx

from tilewright.graph.insert import insert_known
from tilewright.graph.writes import maker
from tilewright.hardware.target import Target
from tilewright.passes.simplify import drop_unread

aten = torch.ops.aten
MOST_BYTES = 64 * 1024
"""Larger results are copied at once, so that their memory is free until the end."""


def write_back_together(graph: fx.Graph, target: Target) -> None:
    """Rewrite `graph`, a forward or inference graph of ATen operators, in place."""
    if not target.is_gpu:
        return
    order = {node: place for place, node in enumerate(graph.nodes)}
    groups: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is aten.copy_.default and _can_wait(node, order):
            groups[_kind(node)].append(node)
    for (number, _), copies in groups.items():
        if len(copies) > 1:
            _together(copies, number, graph.output_node())
    drop_unread(graph)


def _can_wait(copy: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether a copy between small tensors of one layout and dtype can move to the end of the graph."""
    into, value = copy.args[0], copy.args[1]
    if len(copy.args) > 2 or copy.users or not isinstance(into, fx.Node) or not isinstance(value, fx.Node):
        return False
    x, y = into.meta["val"], value.meta["val"]
    alike = (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
    if into.op != "placeholder" or not alike or not x.is_contiguous() or x.numel() * x.itemsize > MOST_BYTES:
        return False
    # Values that show inputs stay: another copy at the end might overwrite them.
    return maker(value).op == "call_function" and all(order[user] <= order[copy] for user in into.users)


def _kind(copy: fx.Node) -> tuple[int | None, object]:
    """The number that is added to the input (None for other values), with dtype and device: one call takes one kind."""
    into, value = copy.args[0], copy.args[1]
    assert isinstance(into, fx.Node) and isinstance(value, fx.Node)
    x = into.meta["val"]
    counts = value.target is aten.add.Tensor and not value.kwargs and value.args[0] is into and len(value.users) == 1
    number = value.args[1] if counts and isinstance(value.args[1], int) else None
    return number, (x.dtype, x.device)


def _together(copies: list[fx.Node], number: int | None, end: fx.Node) -> None:
    inputs, values = ([copy.args[place] for copy in copies] for place in (0, 1))
    for copy in copies:
        copy.graph.erase_node(copy)
    if number is None:
        insert_known(end, aten._foreach_copy_.default, None, inputs, values)
    else:
        insert_known(end, aten._foreach_add_.Scalar, None, inputs, number)
