"""Views that no operator has to compute: elements of a tensor from a known one on, under other strides.

And writes: which operands calls write to, which call allocated the memory of a value, and the order that follows.

    y = sin(x); copy_(x, k); z = cos(x)      →   y before copy_, copy_ before z

Operands do not show this order: all three calls read x.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from typing import NamedTuple, TypeGuard

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.calls import through
from tilewright.graph.specialise import has_symbols
from tilewright.operators.table import row_of

aten = torch.ops.aten
PARTS = frozenset({aten.slice.Tensor, aten.select.int})
PIECES = frozenset({
    aten.split.Tensor, aten.split_with_sizes.default, aten.unsafe_split.Tensor, aten.unsafe_split_with_sizes.default,
    aten.unbind.int,
})  # fmt: skip
"""Views of a part of an operand, and those that give several."""


class Part(NamedTuple):
    """Where the elements of a view begin: so many elements after the first one of `base`."""

    base: fx.Node
    offset: int


def has_static_layout(meta: object) -> TypeGuard[torch.Tensor]:
    """Whether this is a strided, non-empty tensor of known sizes on a CPU or GPU."""
    return (
        isinstance(meta, torch.Tensor)
        and meta.device.type in ("cpu", "cuda")
        and meta.layout is torch.strided
        and not has_symbols(meta)
        and meta.numel() > 0
    )


def is_relabelled(node: fx.Node) -> bool:
    """Whether this is a view of all elements of its operand, from the first one on."""
    row = row_of(node.target) if node.op == "call_function" else None
    return row is not None and row.is_relabelled


def base_of(node: fx.Node) -> fx.Node:
    """The tensor whose elements `node` shows under other strides, all views passed over; else `node` itself."""
    return through(node, lambda view: is_relabelled(view) and _same_storage(view.all_input_nodes[0], view))


def _same_storage(operand: fx.Node, view: fx.Node) -> bool:
    shown, seen = operand.meta.get("val"), view.meta.get("val")
    return has_static_layout(shown) and has_static_layout(seen) and shown.dtype == seen.dtype


def part_of(node: fx.Node) -> Part:
    """The tensor of which `node` shows elements, all views and cuts passed over; else `node` itself."""
    base = node
    while True:
        behind = base_of(base)
        operand = _cut(behind)
        if operand is None or not _same_storage(operand, behind):
            break
        base = operand
    start, begin = (
        n.meta["val"].storage_offset() if has_static_layout(n.meta.get("val")) else 0 for n in (behind, node)
    )
    known = isinstance(start, int) and isinstance(begin, int) and begin >= start
    return Part(behind, begin - start) if known else Part(base_of(node), 0)


def _cut(node: fx.Node) -> fx.Node | None:
    """The operand of which a node is a part, if it is one."""
    if node.op != "call_function":
        return None
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node) and node.args[0].target in PIECES:
        node = node.args[0]
    elif node.target not in PARTS:
        return None
    operand = node.args[0]
    return operand if isinstance(operand, fx.Node) else None


def written(node: fx.Node) -> list[fx.Node]:
    """The operands that this call writes to."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return []
    arguments = zip(node.target._schema.arguments, node.args, strict=False)
    named = [(a, node.kwargs[a.name]) for a in node.target._schema.arguments if a.name in node.kwargs]
    given = [value for argument, value in (*arguments, *named) if argument.is_write]
    lists = [value if isinstance(value, (list, tuple)) else [value] for value in given]
    return [value for values in lists for value in values if isinstance(value, fx.Node)]


def is_written(node: fx.Node) -> bool:
    """Whether a reader writes to the value of `node`."""
    return any(node in written(user) for user in node.users)


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
