"""A case that is not one graph: the graphs into which `torch.compile` cuts it, priced and timed as they run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tilewright.records.errors import CaptureError
from tilewright.records.program import Fallback, Operator, Program, Region
from tilewright.verbs.subject import Subject

if TYPE_CHECKING:
    from tilewright.compile.recording import CompiledGraph
    from tilewright.hardware.profiles import DeviceProfile

A_GRAPH = "a graph of several"


def program_in_pieces(subject: Subject, profile: DeviceProfile, broken: CaptureError) -> Program:
    """The launches of every graph that was compiled when `subject` ran, with costs and times.

    Raises `broken`, the reason why the case is not one graph, if it computes no tensor or nothing may fall back.
    """
    from tilewright.records.errors import first_line, strict

    if strict():
        raise broken
    subject.compile("tilewright")
    if not subject.has_results:
        raise broken
    record = subject.recording
    program = Program(decisions=list(record.decisions), fallbacks=list(record.fallbacks))
    for number, compiled in enumerate(record.graphs, 1):
        program.decisions += compiled.plan.fusion.decisions
        try:
            launches, regions = _priced(compiled, profile, subject.device, f"graph {number}: ")
        # Sizes that depend on data cannot be priced, and the case is measured all the same.
        except Exception as error:
            program.fallbacks.append(Fallback(A_GRAPH, "its price", f"{type(error).__name__}: {first_line(error)}"))
            continue
        program.operators += launches
        program.regions += regions
    return program


def _priced(
    compiled: CompiledGraph, profile: DeviceProfile, device: str, prefix: str
) -> tuple[list[Operator], list[Region]]:
    from tilewright.compile.launches import operators_after
    from tilewright.graph.dims import symbolic_shapes
    from tilewright.runtime.stopwatch import example_inputs, time_in_place

    plan = compiled.plan
    launches, regions = operators_after(plan.name, plan.units, symbolic_shapes(plan.graph, {}, {}), profile)
    times = time_in_place(compiled.executable, example_inputs(plan.graph), device)

    def us(name: str) -> float | None:
        return times[name].us if name in times else None

    return (
        [replace(one, name=prefix + one.name, measured_us=us(one.name)) for one in launches],
        [replace(one, name=prefix + one.name, measured_us=us(one.name)) for one in regions],
    )
