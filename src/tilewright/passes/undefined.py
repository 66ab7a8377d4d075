"""Removes the zeros of incoming gradients that are undefined, such as that of logits beside a loss, from backward.

    dz = add(view(dlogits), zeros)   →   dz = view(dlogits)

A value that depends on no other incoming gradient is undefined too, as in eager, whose autograd does not compute it.
Sums drop it, other operators read zeros instead, and as a result of the graph it is None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_known
from tilewright.graph.layouts import layout
from tilewright.graph.specialise import has_symbols
from tilewright.graph.undefined import UNDEFINED, is_tangent
from tilewright.hardware.target import Target
from tilewright.passes.simplify import drop_unread, is_pure

aten = torch.ops.aten


def drop_undefined(graph: fx.Graph, target: Target) -> None:
    """Remove what depends on the zeros of undefined gradients alone, in place."""
    undefined = {node for node in graph.nodes if UNDEFINED in node.meta}
    if not undefined:
        return
    defined = {node for node in graph.find_nodes(op="placeholder") if is_tangent(node)}
    for node in list(graph.nodes):
        read = [operand for operand in node.all_input_nodes if operand in undefined]
        if any(operand in defined for operand in node.all_input_nodes):
            defined.add(node)
        if not read:
            continue
        if node.op == "output":
            node.args = fx.node.map_arg(node.args, lambda result: None if result in undefined else result)
        elif not is_pure(node):
            continue  # It reads the zeros.
        elif node not in defined:
            undefined.add(node)
        elif (other := _other_term(node, undefined)) is not None:
            node.replace_all_uses_with(other)
        else:
            for operand in filter(_is_contiguous, read):
                node.replace_input_with(operand, _zeros(node, operand))
    drop_unread(graph)


def _other_term(node: fx.Node, undefined: set[fx.Node]) -> fx.Node | None:
    """The term of a sum that remains if the other is undefined; None if its layout differs from the sum's."""
    if str(node.target) != "aten.add.Tensor" or node.kwargs:
        return None
    terms = [term for term in node.args if isinstance(term, fx.Node) and term not in undefined]
    return terms[0] if len(terms) == 1 and layout(terms[0]) == layout(node) else None


def _is_contiguous(node: fx.Node) -> bool:
    value = calls.output(node)
    return value is not None and not has_symbols(value) and value.is_contiguous()


def _zeros(before: fx.Node, like: fx.Node) -> fx.Node:
    value: Any = calls.output(like)
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    return insert_known(before, aten.full.default, value, list(value.shape), 0, **options)
