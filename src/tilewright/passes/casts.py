"""Casts to a wider dtype and back, with nothing but moves between them, are the moves alone.

w = _to_copy(x, float32); v = view(w, …); y = _to_copy(v, bfloat16)      →   y = view(x, …)
"""

from __future__ import annotations

from torch import fx

from tilewright.graph import calls
from tilewright.graph.layouts import before_widening, widening_below


def drop_round_trips(graph: fx.Graph) -> None:
    """Rewrite `graph` in place; what nobody reads any more stays for `simplify`."""
    results = set(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        # A caller's results stay tensors of their own.
        if calls.operator_name(node.target) == "_to_copy" and node not in results:
            _drop(node)


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
        node.replace_all_uses_with(before_widening(wide))
