"""Common subexpressions, no-ops and dead code.

    a = exp(x); b = exp(x); c = a + b        →   a = exp(x); c = a + a
    y = detach(alias(x))                     →   y = x
    t(t(w))                                  →   w

Random draws and writes are neither merged nor removed, and keep their order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tilewright.graph.insert import replace
from tilewright.graph.layouts import layout
from tilewright.graph.views import is_relabelled, maker, shows_operand
from tilewright.hardware.target import Target
from tilewright.operators.table import row_of


def is_pure(node: fx.Node) -> bool:
    """Whether dropping or repeating this call has no observable effect."""
    if node.op != "call_function":
        return False
    row = row_of(node.target)
    if row is not None:
        return row.pure
    if isinstance(node.target, torch._ops.OpOverload):
        schema = node.target._schema
        return not schema.is_mutable and torch.Tag.nondeterministic_seeded not in node.target.tags
    return False


def simplify(graph: fx.Graph, target: Target) -> None:
    """Apply the rewrites in place."""
    seen: dict[Any, fx.Node] = {}
    returned = set(graph.output_node().all_input_nodes)
    shown = {maker(node) for node in returned}
    for node in list(graph.nodes):
        if not is_pure(node):
            continue
        original = _stands_for(node)
        if original is None:
            key = _key(node)
            original = seen.setdefault(key, node) if key is not None else node
        # Two results that a caller may write to stay two tensors with separate memory.
        if node in returned and (original in returned or original.op == "placeholder"):
            continue
        if original is not node:
            if node in shown and original in shown and not shows_operand(node):
                continue
            if node in returned:
                returned.add(original)
            if node in shown:
                shown.add(original)
            replace(node, original)
    drop_unread(graph)


def drop_unread(graph: fx.Graph) -> None:
    """Erase pure calls whose results have no reader."""
    for node in reversed(list(graph.nodes)):
        if is_pure(node) and not node.users:
            graph.erase_node(node)


def _stands_for(node: fx.Node) -> fx.Node | None:
    """The node before this chain of views that has the same elements in the same layout; None if there is none."""
    found, source = None, node
    while is_relabelled(source) and isinstance(source.args[0], fx.Node):
        source = source.args[0]
        if layout(node) == layout(source):
            found = source
    return found


def _key(node: fx.Node) -> Any:
    def freeze(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return tuple(freeze(v) for v in value)
        if isinstance(value, dict):
            return tuple(sorted((k, freeze(v)) for k, v in value.items()))
        # 1, 1.0 and True are equal to Python but not to an operator, and so are 0.0 and -0.0.
        return (type(value), repr(value) if isinstance(value, float) else value)

    key = (node.target, freeze(node.args), freeze(node.kwargs))
    try:
        hash(key)
    except TypeError:
        return None
    return key
