"""A sum or difference whose second operand is a number that changes, scaled by `alpha`, reads the scaled number.

    add(x, s, alpha=3)   →   add(x, s * 3)

PyTorch makes such a number a tensor while it traces, and loses `alpha`.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

from tilewright.passes.rule import Value, call, rule


def _changes(x: object) -> bool:
    return isinstance(x, Node) and isinstance(x.meta.get("example_value"), torch.SymFloat)


@rule(
    call(("add", "sub", "add_", "sub_"), "x", Value("number", (Node,)), alpha=Value("alpha")),
    where=lambda x, number, alpha: _changes(number) and alpha is not None,
    # PyTorch would compute something else.
    required=True,
)
def scale_numbers(node: Node, x: Node, number: Node, alpha: Any) -> Node:
    with node.graph.inserting_before(node):
        scaled = node.graph.call_function(operator.mul, (number, alpha))
    factor = alpha.meta["example_value"] if isinstance(alpha, Node) else alpha
    scaled.meta["example_value"] = number.meta["example_value"] * factor
    node.args, node.kwargs = (x, scaled), {}
    return node
