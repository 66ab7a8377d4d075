"""Which values a discontinuous operator depends on, and which operators give the same bits wherever they run.

A comparison with a maximum finds the largest element only if it sees the values that the maximum saw. So a value on
which a discontinuous operator depends is rounded as eager rounds it in each kernel that computes it, and it is computed
again in another kernel, or in backward, only by operators that any kernel computes alike (`trace.is_repeatable`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from tilewright.graph.calls import arguments, class_of, results
from tilewright.graph.undefined import gradients
from tilewright.hardware.target import Target
from tilewright.operators.table import row_of, rows

EXACT = "exact"
"""Metadata key: whether a discontinuous operator depends on the value, in this graph or in that of backward."""
CONVERSION = rows()["aten._to_copy.default"].body


def mark_exact(graph: fx.Graph, target: Target | None = None) -> None:
    """Mark the values on which a discontinuous operator depends: up to where they come from a library call, and in
    backward up to gradients, which forward has not seen."""
    late = gradients(graph)
    for node in reversed(graph.nodes):
        if node not in late and any(is_discontinuous(user) or _hands_on(user) for user in node.users):
            node.meta[EXACT] = True


def _hands_on(node: fx.Node) -> bool:
    """Whether kernels hand the values of its operands on to a discontinuous operator without a library call."""
    row = row_of(node.target)
    return node.meta.get(EXACT, False) and row is not None and (row.body is not None or class_of(node) == "layout")


def is_discontinuous(node: fx.Node) -> bool:
    """Whether its row says so, or it has none; a conversion is discontinuous only to integers and booleans."""
    if node.op != "call_function" or not results(node):
        return False
    row = row_of(node.target)
    if row is None:
        return True
    if row.body is CONVERSION:
        return not all(value.is_floating_point() for value in results(node))
    return row.discontinuous(arguments(node)) if callable(row.discontinuous) else row.discontinuous


def needs_rounding(node: fx.Node) -> bool:
    """Whether its operands must be rounded to 16 bits as eager rounds them."""
    row = row_of(node.target)
    return is_discontinuous(node) or (row is not None and row.cancels)


def feeding_discontinuous(members: Sequence[fx.Node]) -> set[fx.Node]:
    """Members whose results a discontinuous operator reads, in any kernel: round these to 16 bits as eager does."""
    needed = set[fx.Node]()
    for node in reversed(members):
        users = {u for user in node.users for u in through_moves(user)}
        if node.meta.get(EXACT) or any(u in needed or needs_rounding(u) for u in users):
            needed.add(node)
    return needed


def through_moves(node: fx.Node) -> Iterator[fx.Node]:
    """The node; if it only moves values, as views and gathers do, also its readers through such operators."""
    yield node
    row = row_of(node.target)
    if class_of(node) == "layout" or (row is not None and "self" in row.traffic.gathered):
        for user in node.users:
            yield from through_moves(user)
