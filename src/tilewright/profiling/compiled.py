"""The cost of the graphs that `backend="tilewright"` compiled while a program was recorded."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from tilewright.records.program import Cost, Decision, Fallback, Operator, Program, Region

if TYPE_CHECKING:
    from tilewright.backend import Recording
    from tilewright.compile.plan import GraphPlan


def program_of(record: Recording) -> Program:
    """The launches and regions of every graph in `record`, with bytes and FLOPs, and the decisions.

    Floors are left to the run's analysis, which knows the device's ceilings. A graph that cannot be priced, because its
    sizes depend on data, is among the fallbacks.
    """
    from tilewright.graph.capture import first_line

    program = Program(decisions=list(record.decisions), fallbacks=list(record.fallbacks))
    for compiled in record.graphs:
        program.decisions += compiled.plan.fusion.decisions
        try:
            launches, regions = _priced(compiled.plan)
        # An error here must not end the program that is being recorded.
        except Exception as error:
            why = f"{type(error).__name__}: {first_line(error)}"
            program.fallbacks.append(Fallback(f"the cost of a {compiled.plan.name} graph", "a recorded program", why))
            continue
        program.operators += launches
        program.regions += regions
    return program


def _priced(plan: GraphPlan) -> tuple[list[Operator], list[Region]]:
    from tilewright.compile.launches import operators_after
    from tilewright.graph.dims import symbolic_shapes
    from tilewright.hardware.profiles import profile_for

    shapes = symbolic_shapes(plan.graph, {}, {})
    # Any profile is fine, since its floors are dropped.
    launches, regions = operators_after(plan.name, plan.units, shapes, profile_for("cpu"))
    return (
        [replace(launch, floor_us=None, bound=None) for launch in launches],
        [replace(region, floor_us=None, bound=None, predicted_us=None) for region in regions],
    )


def as_json(program: Program) -> str:
    return json.dumps(asdict(program))


def from_json(texts: Iterable[str]) -> Program | None:
    """The programs of several processes merged, without duplicates; None if no process compiled a graph."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for text in texts:
        for name, rows in json.loads(text).items():
            found.setdefault(name, {}).update((json.dumps(row), row) for row in rows)
    if not any(found.values()):
        return None
    rows = {name: list(distinct.values()) for name, distinct in found.items()}
    return Program(
        operators=[Operator(**row | _tuples(row, "shape", "inputs")) for row in rows["operators"]],
        regions=[Region(**row | _tuples(row, "members")) for row in rows["regions"]],
        decisions=[Decision(**row) for row in rows["decisions"]],
        fallbacks=[Fallback(**row) for row in rows["fallbacks"]],
    )


def _tuples(row: dict[str, Any], *names: str) -> dict[str, Any]:
    return {"cost": Cost(**row["cost"])} | {name: tuple(row[name]) for name in names}
