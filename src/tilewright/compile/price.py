"""A case as eager runs it and as it is planned: operators, regions, decisions and memory, priced for a target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

from tilewright.compile.capture import Captured, capture
from tilewright.compile.launches import operators_after, operators_before, with_predictions
from tilewright.compile.memory import eager_steps, memory
from tilewright.compile.plan import Plan
from tilewright.compile.planner import Planner
from tilewright.compile.repetition import Irregular, in_words, iterations, with_all_iterations
from tilewright.graph.dims import SymbolicShapes, symbolic_shapes
from tilewright.graph.tree import Group, annotated_tree
from tilewright.hardware.target import Target
from tilewright.records import program as records
from tilewright.records.case import Case
from tilewright.records.program import Decision, GraphName, Program


@dataclass
class PricedCase:
    """A case's program with every cost, eager's graphs, and the plan."""

    program: Program
    eager: Captured
    plan: Plan


def price_case(case: Case, target: Target) -> PricedCase:
    """Operators as eager runs them, the launches of the plan for `target`, its decisions and memory.

    Nothing is computed, unless the target measures: then offers are raced on this machine.
    """
    return _priced(case, target)


def price_program(case: Case, target: Target) -> Program:
    """The program of `price_case`; of a long one that repeats, a few iterations are captured and all are counted."""
    priced = _priced(case, target, fold=True)
    if (part := priced.eager.folded) is None:
        return priced.program
    # What a loop leaves to its readers is freed behind them, of which the next loop's points know nothing.
    whole = priced.program if len(part.loops) == 1 else replace(priced.program, memory=[])
    with suppress(Irregular):
        for number, loop in enumerate(part.loops):
            eager = {name: iterations(graph.nodes, number) for name, graph in priced.eager.graphs.items()}
            planned = {graph.name: iterations(graph.units, number) for graph in priced.plan.graphs}
            operators = {graph.name: iterations(graph.graph.nodes, number) for graph in priced.plan.graphs}
            whole = with_all_iterations(whole, loop, eager, planned, operators)
        whole.folded = in_words(part)
        return whole
    return price_case(case, target).program


def _priced(case: Case, target: Target, *, fold: bool = False) -> PricedCase:
    program = Program()
    profile = target.profile
    eager = capture(case, target=target, fold=fold)
    shapes = _shapes(case, eager)
    for name, graph in eager.graphs.items():
        program.operators += operators_before(name, graph, shapes[name], profile)
        program.memory += memory(name, "before", eager.graphs, eager_steps(graph))
    planned = capture(case, Planner(target), instead=eager.traced)
    assert planned.plan is not None
    _add_plan(program, planned.plan, _shapes(case, planned))
    return PricedCase(program, eager, planned.plan)


def _add_plan(program: Program, plan: Plan, shapes: dict[GraphName, SymbolicShapes]) -> None:
    """Add the launches, decisions and memory of `plan`, priced for its target."""
    profile = plan.target.profile
    program.decisions += plan.decisions
    program.memory += plan.memory()
    for graph in plan.graphs:
        named = shapes[graph.name]
        fusion = graph.fusion
        program.decisions += with_predictions(fusion.decisions, [*fusion.regions, *fusion.refused], profile)
        launches, regions = operators_after(graph.name, graph.units, named, profile)
        program.operators += launches
        program.regions += regions
        program.decisions = list(_with_chosen(program.decisions, launches))


def _shapes(case: Case, captured: Captured) -> dict[GraphName, SymbolicShapes]:
    graph, specs = captured.graphs["forward"], case.specs()
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    named = {
        placeholders[position].name: specs[index].names
        for position, index in captured.inputs.items()
        if position < len(placeholders)
    }
    shapes: dict[GraphName, SymbolicShapes] = {"forward": symbolic_shapes(graph, named, case.named_sizes())}
    if "backward" in captured.graphs:
        shapes["backward"] = symbolic_shapes(
            captured.graphs["backward"], {}, case.named_sizes(), forward=shapes["forward"]
        )
    return shapes


def _with_chosen(decisions: Iterable[Decision], launches: Iterable[records.Operator]) -> Iterator[Decision]:
    """The decisions on an attention kernel with the predicted time of the launch that they chose."""
    times = {launch.name: launch.predicted_us for launch in launches}
    for decision in decisions:
        chosen = decision.passed_by == "attention" and decision.predicted_us is None
        yield replace(decision, predicted_us=times.get(decision.consumer)) if chosen else decision


def tree_of(case: Case) -> Group:
    """The forward graph of `case` as eager runs it, as an annotated tree."""
    # Captured for inference, so that there are no views that only backward needs.
    case = replace(case, training=False)
    captured = capture(case, fold=True)
    part = captured.folded
    loops = [f"{loop.kept:,} of {loop.cycle.count:,} equal iterations" for loop in (part.loops if part else ())]
    shown = f" ({'; '.join(loops)})" if loops else ""
    return annotated_tree(captured.graphs["forward"], _shapes(case, captured)["forward"], case.name + shown)
