"""A dropout that drops nothing is its operand, as in eager: what is written to its result, the operand has too.

    y = dropout(x, p, training=False); y += 1    →   x += 1
    y = dropout(x, 0.0); y += 1                  →   x += 1

PyTorch traces it as a copy.
"""

from __future__ import annotations

from torch import fx

from tilewright.graph.canonical import argument, canonical_name
from tilewright.hardware.target import Target
from tilewright.passes.attention.match import is_active


def drop_identities(graph: fx.Graph, target: Target) -> None:
    """Rewrite a torch-level graph from Dynamo, on every `target`, in place."""
    for node in graph.nodes:
        if canonical_name(node) in ("dropout", "dropout_") and not is_active(node):
            operand = argument(node, 0, "input")
            if isinstance(operand, fx.Node):
                node.replace_all_uses_with(operand)
                graph.erase_node(node)
