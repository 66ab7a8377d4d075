"""Casts to a wider dtype and back that have only views and copies between them are views of what is cast.

w = _to_copy(x, float32); v = view(w, …); y = _to_copy(v, bfloat16)      →   y = view(x, …)
"""

from __future__ import annotations

from torch import fx

from tilewright.graph import calls
from tilewright.graph.layouts import before_widening, widening_below
from tilewright.graph.views import maker
from tilewright.passes.units import gradients


def drop_round_trips(graph: fx.Graph) -> None:
    """Rewrite `graph`, a joint or inference graph, in place; `simplify` erases calls without readers."""
    computed = gradients(graph)
    results = set(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        if calls.operator_name(node.target) != "_to_copy":
            continue
        # Backward must not keep the memory of a forward result, since the caller may write to it.
        if node not in results or ((node in computed or not computed) and _is_alone(node, results)):
            _drop(node)


def _is_alone(node: fx.Node, results: set[fx.Node]) -> bool:
    """Whether the graph allocates the memory of the value that is cast, and returns nothing else that shares it."""
    cast = widening_below(node.all_input_nodes[0])
    if cast is None:
        return False
    memory = maker(cast.all_input_nodes[0])
    return memory.op == "call_function" and all(maker(other) is not memory for other in results)


def _drop(node: fx.Node) -> None:
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
