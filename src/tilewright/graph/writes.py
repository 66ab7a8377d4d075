"""Which operands calls write to, which call allocated the memory of a value, and the order that follows from writes.

    y = sin(x); copy_(x, k); z = cos(x)      →   y before copy_, copy_ before z

Operands do not show this order: all three calls read x.
"""

from __future__ import annotations

import operator
from collections import defaultdict

import torch
from torch import fx

from tilewright.graph import calls


def written(node: fx.Node) -> list[fx.Node]:
    """The operands that this call writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = zip(node.target._schema.arguments, node.args, strict=False)
    named = [(a, node.kwargs[a.name]) for a in node.target._schema.arguments if a.name in node.kwargs]
    given = [value for argument, value in (*arguments, *named) if argument.is_write]
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in given]
    return [value for values in lists for value in values if isinstance(value, fx.Node)]


def shows_operand(node: fx.Node) -> bool:
    """Whether a call gives its operand's own storage."""
    schema = getattr(node.target, "_schema", None)
    aliases = schema is not None and any(result.alias_info is not None for result in schema.returns)
    return bool(node.all_input_nodes) and (aliases or calls.is_view(node))


def maker(node: fx.Node) -> fx.Node:
    """The call that allocated the memory of `node`."""
    return calls.through(node, lambda call: call.target is operator.getitem or shows_operand(call))


def hazards(graph: fx.Graph) -> dict[fx.Node, set[fx.Node]]:
    """For each call that writes memory, or reads memory that another call writes: the earlier calls it must follow."""
    writes: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for node in graph.nodes:
        for operand in written(node):
            writes[maker(operand)].add(node)
    users: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.op == "call_function" and not calls.is_view(node):
            for memory in {maker(operand) for operand in node.all_input_nodes} & writes.keys():
                users[memory].append(node)
    found: dict[fx.Node, set[fx.Node]] = defaultdict(set)
    for memory, touching in users.items():
        for place, node in enumerate(touching):
            found[node].update(before for before in touching[:place] if {before, node} & writes[memory])
    return found
