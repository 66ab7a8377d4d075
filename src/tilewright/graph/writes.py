"""Which operands calls write to, and which call allocated the memory of a value."""

from __future__ import annotations

import operator

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
