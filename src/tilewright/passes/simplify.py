"""Common subexpressions, no-ops and dead code.

    a = exp(x); b = exp(x); c = a + b        →   a = exp(x); c = a + a
    y = detach(alias(x))                     →   y = x
    t(t(w))                                  →   w

Casts to a wider dtype and back that have only views and copies between them are views of what is cast:

    w = _to_copy(x, float32); v = view(w, …); y = _to_copy(v, bfloat16)      →   y = view(x, …)

Random draws and writes are neither merged nor removed, and keep their order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import replace
from tilewright.graph.layouts import before_widening, layout, widening_below
from tilewright.graph.undefined import gradients
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


def drop_round_trips(graph: fx.Graph) -> None:
    """Rewrite `graph`, a joint or inference graph, in place; `simplify` erases calls without readers."""
    computed = gradients(graph)
    results = set(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        if calls.operator_name(node.target) != "_to_copy":
            continue
        # Backward must not keep the memory of a forward result, since the caller may write to it.
        if node not in results or ((node in computed or not computed) and _is_alone(node, results)):
            _drop_round_trip(node)


def _is_alone(node: fx.Node, results: set[fx.Node]) -> bool:
    """Whether the graph allocates the memory of the value that is cast, and returns nothing else that shares it."""
    cast = widening_below(node.all_input_nodes[0])
    if cast is None:
        return False
    memory = maker(cast.all_input_nodes[0])
    return memory.op == "call_function" and all(maker(other) is not memory for other in results)


def _drop_round_trip(node: fx.Node) -> None:
    wide = node.all_input_nodes[0]
    cast = widening_below(wide)
    result = calls.output(node)
    source = None if cast is None else calls.output(cast.all_input_nodes[0])
    moved = calls.output(wide)
    if source is None or result is None or moved is None:
        return
    same = source.dtype == result.dtype and result.device == moved.device
    if same and calls.strides_of(result) == calls.strides_of(moved):
        found = before_widening(wide)
        if calls.strides_of(calls.output(found)) == calls.strides_of(result):  # type: ignore[arg-type]
            node.replace_all_uses_with(found)
