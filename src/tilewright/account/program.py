"""A case's program: operators, planned regions, decisions and memory, in one record."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tilewright.account.capture import Captured, capture
from tilewright.account.launches import floor_of, operators_after, operators_before, with_predictions
from tilewright.account.memory import eager_steps, memory, planned_steps
from tilewright.graph.dims import SymbolicShapes, symbolic_shapes
from tilewright.graph.tree import Group, annotated_tree
from tilewright.hardware.language import planned_for
from tilewright.hardware.profiles import DeviceProfile
from tilewright.passes.fusion import fuse
from tilewright.passes.schedule import schedule
from tilewright.records import program as records
from tilewright.records.case import Case
from tilewright.records.program import Cost, Decision, GraphName, Program
from tilewright.tune.settle import settle


@dataclass
class Account:
    """A case's program, and the graphs it was read from."""

    program: Program
    eager: Captured
    planned: Captured


def account(case: Case, profile: DeviceProfile, *, measure: bool = False, device: str = "cpu") -> Account:
    """Operators as eager runs them, the planned regions, the decisions and the memory of `case`.

    The plan is that of the profile's device, though `case` be captured on another (`device`); what only a race on
    that device can settle is left as it is there without one.
    `measure` races each region against its operators one by one on this machine, and on a GPU each attention.
    """
    program = Program()
    with planned_for(profile.device, profile.capability):
        eager = capture(case, optimised=False, device=device)
        shapes = _shapes(case, eager)
        for name, graph in eager.graphs.items():
            program.operators += operators_before(name, graph, shapes[name], profile)
            program.memory += memory(name, "before", eager, eager_steps(graph))
        planned = _plan(program, case, profile, measure, device)
    return Account(program, eager, planned)


def _plan(program: Program, case: Case, profile: DeviceProfile, measure: bool, device: str) -> Captured:
    """Fill `program` with what becomes of the case."""

    def price(cost: Cost, dtype: str) -> float | None:
        return floor_of(cost, dtype, "compute", profile)[0]

    planned = capture(case, optimised=True, device=device, measure=measure, price=price)
    program.decisions += planned.decisions
    shapes = _shapes(case, planned)
    for name, graph in planned.graphs.items():
        proposed = fuse(graph, name)
        fusion = settle(proposed, measure=measure)
        units = schedule(graph, fusion.regions)
        program.decisions += with_predictions(
            fusion.decisions, [*proposed.regions, *proposed.refused], shapes[name], profile
        )
        launches, regions = operators_after(name, units, shapes[name], profile)
        program.operators += launches
        program.regions += regions
        program.decisions = list(_with_floors(program.decisions, launches))
        program.memory += memory(name, "after", planned, planned_steps(graph, units))
    return planned


def _shapes(case: Case, captured: Captured) -> dict[GraphName, SymbolicShapes]:
    graph = captured.graphs["forward"]
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    named = {
        placeholders[position].name: tuple(case.inputs[index].names)
        for position, index in captured.inputs.items()
        if position < len(placeholders)
    }
    shapes = {"forward": symbolic_shapes(graph, named, case.named_sizes())}
    if "backward" in captured.graphs:
        shapes["backward"] = symbolic_shapes(
            captured.graphs["backward"], {}, case.named_sizes(), forward=shapes["forward"]
        )
    return shapes  # type: ignore[return-value]


def _with_floors(decisions: Iterable[Decision], launches: Iterable[records.Operator]) -> Iterator[Decision]:
    """The decisions on an attention kernel with the floor of the launch that they chose."""
    floors = {launch.name: launch.floor_us for launch in launches}
    for decision in decisions:
        chosen = decision.passed_by == "attention" and decision.predicted_us is None
        yield replace(decision, predicted_us=floors.get(decision.consumer)) if chosen else decision


def tree_of(case: Case) -> Group:
    """The forward graph of `case` as eager runs it, as an annotated tree."""
    # Captured for inference, where views that only backward needs do not stand behind the result.
    case = replace(case, training=False)
    captured = capture(case, optimised=False)
    return annotated_tree(captured.graphs["forward"], _shapes(case, captured)["forward"], case.name)
