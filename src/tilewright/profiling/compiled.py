"""The cost of the graphs that `backend="tilewright"` compiled while a program was recorded."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, TypeVar

from tilewright.records.program import Fallback, Operator, Program, Region

if TYPE_CHECKING:
    from tilewright.compile.plan import GraphPlan
    from tilewright.compile.recording import Recording

Row = TypeVar("Row")


def program_of(record: Recording) -> Program:
    """The launches and regions of every graph in `record`, with bytes and FLOPs, and the decisions.

    Floors are left to the run's analysis, which knows the device's ceilings. A graph that cannot be priced, because its
    sizes depend on data, is among the fallbacks.
    """
    from tilewright.records.errors import first_line

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


def merged(programs: Sequence[Program]) -> Program | None:
    """The programs of several processes as one, equal rows once; None if no process compiled a graph."""
    found = Program(
        operators=_distinct(program.operators for program in programs),
        regions=_distinct(program.regions for program in programs),
        decisions=_distinct(program.decisions for program in programs),
        fallbacks=_distinct(program.fallbacks for program in programs),
    )
    return None if found == Program() else found


def _distinct(parts: Iterable[Iterable[Row]]) -> list[Row]:
    return list(dict.fromkeys(chain.from_iterable(parts)))
