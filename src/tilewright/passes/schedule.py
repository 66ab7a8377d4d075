"""The order in which the kernels and library calls of a graph run, and when each value is last needed.

A region runs at the place of its last member, unless a reader needs it earlier. Calls that draw random numbers or
write an operand keep their order, and reads of a written operand stay before or after the write (`hazards`). In
backward a call that gives a result of the graph (the gradient of a weight) runs as soon as its operands exist, which
frees them early; at the end, if the result is larger than all its operands.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

from torch import fx

from tilewright.graph.calls import closure, nbytes, readers
from tilewright.graph.undefined import gradients, is_tangent
from tilewright.graph.views import hazards
from tilewright.passes.fusion import Region
from tilewright.passes.simplify import is_pure
from tilewright.passes.units import has_known_sizes, is_view, sources

Unit = Region | fx.Node


def schedule(graph: fx.Graph, regions: list[Region]) -> list[Unit]:
    """Regions, library calls and the views that library calls and results need, in a legal order."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    unit_of: dict[fx.Node, Unit] = {m: r for r in regions for m in r.members}
    for region in regions:
        unit_of.update({value: region for value in region.lowered.outputs})
    needed = _needed(graph, unit_of)
    units: list[Unit] = [unit for unit in (*regions, *graph.nodes) if unit in needed]
    for node in units:
        if isinstance(node, fx.Node):
            unit_of[node] = node
    before = {unit: {unit_of[node] for node in _reads(unit) if node in unit_of} - {unit} for unit in units}
    last_impure: Unit | None = None
    for node in graph.nodes:
        if node.op == "call_function" and node in needed and not is_view(node) and not is_pure(node):
            if last_impure is not None:
                before[node].add(last_impure)
            last_impure = node
    for node, earlier in hazards(graph).items():
        # A kernel whose value nothing reads does not run.
        if (unit := unit_of.get(node)) in before:
            before[unit].update(other for e in earlier if (other := unit_of.get(e)) in before)
    for unit in units:
        before[unit].discard(unit)
    return _topological(units, before, order)


def _needed(graph: fx.Graph, unit_of: dict[fx.Node, Unit]) -> set[Unit]:
    """The nodes that must run: results, impure calls, their operands. A kernel may not read all its members'
    operands."""

    def units(nodes: Iterable[fx.Node]) -> list[Unit]:
        return [unit_of.get(n, n) for n in nodes if n.op != "placeholder"]

    impure = [n for n in graph.nodes if n.op == "call_function" and not is_pure(n)]
    start = units([*graph.output_node().all_input_nodes, *impure])
    return closure(start, lambda unit: units(_reads(unit)))


def _reads(unit: Unit) -> Sequence[fx.Node]:
    return unit.lowered.inputs if isinstance(unit, Region) else unit.all_input_nodes


def _topological(units: list[Unit], before: dict[Unit, set[Unit]], order: dict[fx.Node, int]) -> list[Unit]:
    """Units by rank, each after its dependencies; views and recomputed values as late as possible."""
    placed = _gradients_of_weights(units, order)

    def rank(unit: Unit) -> int:
        return placed[unit] if unit in placed else order[unit.members[-1] if isinstance(unit, Region) else unit]

    lazy = _computed_again(units, before, order)
    # Take one of several results at once: until then all of them stay allocated.
    lazy |= {u for u in units if isinstance(u, fx.Node) and is_view(u) and u.target is not operator.getitem}
    done: dict[Unit, None] = {}
    for unit in sorted(units, key=lambda u: (u in lazy, rank(u))):
        stack = [unit]
        while stack:
            waiting = sorted((u for u in before[stack[-1]] if u not in done), key=rank)
            assert not set(waiting) & set(stack), "regions form a cycle"
            if waiting:
                stack.append(waiting[0])
            else:
                done.setdefault(stack.pop())
    return list(done)


def _computed_again(units: list[Unit], before: dict[Unit, set[Unit]], order: dict[fx.Node, int]) -> set[Unit]:
    """Units of a backward graph that do not depend on the incoming gradients."""
    incoming = {n for n in order if is_tangent(n)}
    if not incoming:
        return set()
    waits: dict[Unit, bool] = {}

    def waits_for_gradients(unit: Unit) -> bool:
        if unit not in waits:
            waits[unit] = any(r in incoming for r in _reads(unit)) or any(map(waits_for_gradients, before[unit]))
        return waits[unit]

    def place(unit: Unit) -> int:
        return order[unit.members[0] if isinstance(unit, Region) else unit]

    return {unit for unit in sorted(units, key=place) if not waits_for_gradients(unit)}


def _gradients_of_weights(units: list[Unit], order: dict[fx.Node, int]) -> dict[Unit, int]:
    """For each library call of a backward graph whose result only the caller reads: the position of the gradient it
    reads, or, if it takes more memory than it frees, a position after all others, largest operands first."""
    found: dict[Unit, int] = {}
    late: dict[fx.Node, int] = {}
    computed = gradients(next(iter(order)).graph)
    for unit in units:
        if isinstance(unit, fx.Node) and not is_view(unit) and all(r.op == "output" for r in readers(unit)):
            operands = set(sources(unit))
            places = [order[source] for source in operands if source in computed]
            is_sized = all(map(has_known_sizes, (unit, *operands)))
            if places and is_sized and (read := sum(map(nbytes, operands))) < nbytes(unit):
                late[unit] = read
            elif places:
                found[unit] = max(places)
    ends = sorted(late, key=late.__getitem__, reverse=True)
    return found | {unit: len(order) + i for i, unit in enumerate(ends)}
