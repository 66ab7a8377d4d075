"""The order of calls in a graph that follows from writes to memory that another call reads or writes.

    y = sin(x); copy_(x, k); z = cos(x)      →   y before copy_, copy_ before z

Operands do not show this order: all three calls read x.
"""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from tilewright.graph import calls
from tilewright.graph.writes import maker, written


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
