"""Recognises calls that make tensors of zeros; makes one tensor of zeros per graph for the kernels' counters.

`drop_undefined` removes from backward the zeros of incoming gradients that are undefined, such as that of logits beside
a loss:

    dz = add(view(dlogits), zeros)   →   dz = view(dlogits)

A value that depends on no other incoming gradient is undefined too, as in eager, whose autograd does not compute it.
Sums drop it, other operators read zeros instead, and as a result of the graph it is None.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_call, insert_known
from tilewright.graph.layouts import layout
from tilewright.graph.specialise import has_symbols
from tilewright.graph.undefined import UNDEFINED, is_tangent
from tilewright.hardware.target import Target
from tilewright.passes.simplify import drop_unread, is_pure

aten: Any = torch.ops.aten
MARK = "tilewright_zeros"
"""Metadata key of the shared zeros; its value is their number."""
LEAST = 4096
ZEROS = (aten.new_zeros.default, aten.zeros.default, aten.zeros_like.default)
ONES = (aten.new_ones.default, aten.ones.default, aten.ones_like.default)
FILLED = {aten.full.default: 1, aten.full_like.default: 1, aten.new_full.default: 2}
"""By operator, the index of the argument that is the fill value."""


def is_zeros(node: object) -> bool:
    """Whether a call makes a tensor of zeros."""
    return is_filled(node, 0)


def is_filled(node: object, number: int) -> bool:
    """Whether a call makes a tensor whose elements are all `number`, 0 or 1."""
    if not isinstance(node, fx.Node):
        return False
    place = FILLED.get(node.target)
    return node.target in (ONES if number else ZEROS) if place is None else bool(node.args[place] == number)


def shared_zeros(like: fx.Node, count: int) -> fx.Node:
    """At least `count` int32 zeros on the device of `like`, made at the start of its graph."""
    graph = like.graph
    for node in graph.nodes:
        if node.meta.get(MARK, 0) >= count:
            return node  # type: ignore[no-any-return]
    size, device = max(LEAST, 1 << (count - 1).bit_length()), calls.results(like)[0].device
    first = next(node for node in graph.nodes if node.op != "placeholder")
    made = insert_call(first, aten.full.default, [size], 0, dtype=torch.int32, device=device, pin_memory=False)
    made.meta[MARK] = size
    return made


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
            for operand, value in [(one, calls.output(one)) for one in read]:
                if value is not None and not has_symbols(value) and value.is_contiguous():
                    options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
                    zeros = insert_known(node, aten.full.default, value, list(value.shape), 0, **options)
                    node.replace_input_with(operand, zeros)
    drop_unread(graph)


def _other_term(node: fx.Node, undefined: set[fx.Node]) -> fx.Node | None:
    """The term of a sum that remains if the other is undefined; None if its layout differs from the sum's."""
    if str(node.target) != "aten.add.Tensor" or node.kwargs:
        return None
    terms = [term for term in node.args if isinstance(term, fx.Node) and term not in undefined]
    return terms[0] if len(terms) == 1 and layout(terms[0]) == layout(node) else None
