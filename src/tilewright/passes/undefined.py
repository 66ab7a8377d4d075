"""Removes incoming gradients that are known to be undefined, such as that of logits beside a loss, from backward.

    dz = add(view(dlogits), tangents_2)   →   dz = view(dlogits)

As in eager, an undefined gradient adds nothing; in AOTAutograd's graph it is a tensor of zeros. Results of linear
operators on it are undefined too; readers of other kinds get zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_known
from tilewright.passes.simplify import drop_unread
from tilewright.passes.units import is_view

aten = torch.ops.aten
KEEPING = {"_to_copy", "clone", "neg", "slice_backward", "select_backward", "constant_pad_nd", "sum", "expand"}
"""Operators of one tensor that make zeros of zeros."""
PRODUCTS = {"mul", "mm", "bmm"}
"""Operators whose result is zero if one operand is."""


def drop_undefined(graph: fx.Graph, places: Sequence[int]) -> bool:
    """Take the inputs at these places out of a backward graph, in place; False where it cannot do without them."""
    inputs = graph.find_nodes(op="placeholder")
    absent = [inputs[place] for place in places]
    undefined = set(absent)
    for node in list(graph.nodes):
        read = [operand for operand in node.all_input_nodes if operand in undefined]
        if not read or node in undefined:
            continue
        if (other := _other_term(node, undefined)) is not None:
            node.replace_all_uses_with(other)
        elif _is_undefined(node, undefined):
            undefined.add(node)
        elif not all(_is_contiguous(operand) for operand in read):
            return False
        else:
            for operand in read:
                node.replace_input_with(operand, _zeros(node, operand))
    drop_unread(graph)
    for node in absent:
        graph.erase_node(node)
    return True


def _other_term(node: fx.Node, undefined: set[fx.Node]) -> fx.Node | None:
    """The term of a sum that remains if the other is undefined; None if its layout differs from the sum's."""
    if str(node.target) != "aten.add.Tensor" or node.kwargs:
        return None
    terms = [term for term in node.args if isinstance(term, fx.Node) and term not in undefined]
    result = calls.output(node)
    value = calls.output(terms[0]) if len(terms) == 1 else None
    if result is None or value is None:
        return None
    alike = value.dtype == result.dtype and value.shape == result.shape and value.stride() == result.stride()
    return terms[0] if alike else None


def _is_undefined(node: fx.Node, undefined: set[fx.Node]) -> bool:
    if node.op != "call_function":
        return False
    name, first = calls.operator_name(node.target), node.args[0]
    if name in PRODUCTS:
        return True
    if name == "constant_pad_nd" and any(node.args[2:]):
        return False
    alone = set(node.all_input_nodes) <= undefined
    return alone and first in undefined and (is_view(node) or name in KEEPING or name == "add")


def _is_contiguous(node: fx.Node) -> bool:
    value = calls.output(node)
    return value is not None and value.is_contiguous()


def _zeros(before: fx.Node, like: fx.Node) -> fx.Node:
    value: Any = calls.output(like)
    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
    return insert_known(before, aten.full.default, value, list(value.shape), 0, **options)
