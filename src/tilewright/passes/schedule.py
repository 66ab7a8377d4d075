"""The order in which the kernels and library calls of a graph run, and when each value is last needed.

A region runs where its last member stood, unless a reader needs it earlier. Calls that draw random
numbers or write an operand keep their order among themselves.
"""

from __future__ import annotations

import heapq

from torch import fx

from tilewright.passes.fusion import Region
from tilewright.passes.simplify import is_pure
from tilewright.passes.units import is_view

Unit = Region | fx.Node


def schedule(graph: fx.Graph, regions: list[Region]) -> list[Unit]:
    """Regions, library calls and the views that library calls and results need, in a legal order."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    unit_of: dict[fx.Node, Unit] = {m: r for r in regions for m in r.members}
    for region in regions:
        unit_of.update({value: region for value in region.lowered.outputs})
    needed = _needed(graph, regions, unit_of)
    units: list[Unit] = [*regions, *(n for n in graph.nodes if n in needed)]
    for node in units:
        if isinstance(node, fx.Node):
            unit_of[node] = node
    before = {unit: _waits_for(unit, unit_of) - {unit} for unit in units}
    last_impure: Unit | None = None
    for node in graph.nodes:
        if node.op == "call_function" and node in needed and not is_view(node) and not is_pure(node):
            if last_impure is not None:
                before[node].add(last_impure)
            last_impure = node
    return _topological(units, before, order)


def _needed(graph: fx.Graph, regions: list[Region], unit_of: dict[fx.Node, Unit]) -> set[fx.Node]:
    """Nodes outside regions that must run: results, impure calls, and what they and the kernels read."""
    kept = {n for n in graph.nodes if n.op == "call_function" and n not in unit_of and not is_view(n)}
    todo = [*graph.output_node().all_input_nodes, *(i for r in regions for i in r.lowered.inputs)]
    todo += [operand for node in kept for operand in node.all_input_nodes]
    while todo:
        node = todo.pop()
        if node in unit_of or node in kept or node.op == "placeholder":
            continue
        kept.add(node)
        todo.extend(node.all_input_nodes)
    return kept


def _waits_for(unit: Unit, unit_of: dict[fx.Node, Unit]) -> set[Unit]:
    reads = unit.lowered.inputs if isinstance(unit, Region) else tuple(unit.all_input_nodes)
    return {unit_of[node] for node in reads if node in unit_of}


def _topological(units: list[Unit], before: dict[Unit, set[Unit]], order: dict[fx.Node, int]) -> list[Unit]:
    def rank(unit: Unit) -> int:
        return order[unit.members[-1]] if isinstance(unit, Region) else order[unit]

    after: dict[Unit, list[Unit]] = {unit: [] for unit in units}
    for unit, earlier in before.items():
        for other in earlier:
            after[other].append(unit)
    waiting = {unit: len(earlier) for unit, earlier in before.items()}
    ready = [(rank(unit), i, unit) for i, unit in enumerate(units) if not waiting[unit]]
    heapq.heapify(ready)
    done: list[Unit] = []
    while ready:
        _, _, unit = heapq.heappop(ready)
        done.append(unit)
        for follower in after[unit]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heapq.heappush(ready, (rank(follower), len(units) + len(done), follower))
    assert len(done) == len(units), "regions form a cycle"
    return done
