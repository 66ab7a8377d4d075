"""Operators, launches and regions of a graph as records: cost, floor, bound, predicted time."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import fx

from tilewright.compile.plan import GraphPlan
from tilewright.cost.kinds import call_work, region_work
from tilewright.cost.memory import reuse_distances
from tilewright.cost.nests import nest_cost
from tilewright.cost.operators import floor_of, operator_cost
from tilewright.cost.products import rate_dtype
from tilewright.cost.symbols import pretty
from tilewright.cost.work import Distances, Work, predicted_us
from tilewright.emit.source import source_of
from tilewright.graph import calls
from tilewright.graph.dims import SymbolicShapes, symbolic_shapes
from tilewright.graph.source import source_line
from tilewright.hardware.profiles import DeviceProfile
from tilewright.operators.table import row_of
from tilewright.passes.fusion import Region
from tilewright.passes.schedule import Unit
from tilewright.passes.units import is_view
from tilewright.records import program as records
from tilewright.records.program import Cost, Decision, GraphName
from tilewright.schedule.choose import schedule_of
from tilewright.schedule.cpu import cpu_schedule
from tilewright.schedule.schedule import Schedule
from tilewright.schedule.tiles import Limits


def operators_before(
    name: GraphName, graph: fx.Graph, shapes: SymbolicShapes, profile: DeviceProfile
) -> list[records.Operator]:
    """One record for each operator that eager launches or views it makes."""
    nodes = [n for n in graph.nodes if n.op == "call_function" and not _is_result_of_several(n)]
    return [_operator(name, "before", i, n, operator_cost(n, shapes), shapes, profile) for i, n in enumerate(nodes)]


def _is_result_of_several(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def _operator(
    graph: GraphName,
    stage: records.Stage,
    index: int,
    node: fx.Node,
    cost: Cost,
    shapes: SymbolicShapes,
    profile: DeviceProfile,
    distances: Distances = (),
) -> records.Operator:
    value = next((v for v in calls.outputs(node) if v is not None), None)
    kind = calls.class_of(node)
    floor, bound = (None, None) if kind == "layout" else floor_of(cost, rate_dtype(node), kind, profile)
    is_known = floor is not None
    symbolic = shapes.of_outputs(node)[0] if value is not None else None
    return records.Operator(
        graph=graph,
        stage=stage,
        index=index,
        name=node.name,
        target=row.name if (row := row_of(calls.launched(node))) else calls.operator_name(node.target),
        operator_class=kind,
        shape=calls.shape_of(value) if value is not None else (),
        dtype=_dtype(value),
        cost=cost,
        floor_us=floor,
        bound=bound,
        source=source_line(node),
        shape_symbolic=None if symbolic is None else "[" + ", ".join(map(pretty, symbolic)) + "]",
        inputs=tuple(dict.fromkeys(_behind_results(n).name for n in node.all_input_nodes)),
        predicted_us=_predicted_us(call_work(node, cost), distances, profile) if is_known and cost.bytes else None,
    )


def _predicted_us(work: Work, distances: Distances, profile: DeviceProfile) -> float:
    return predicted_us(replace(work, distances=distances), profile)


def _distances(units: Sequence[Unit]) -> list[Distances]:
    """For each unit the reuse distances of the tensors that it reads, in the order of the program."""
    return reuse_distances([
        (unit.lowered.inputs, unit.lowered.outputs)
        if isinstance(unit, Region)
        else ([node for node in unit.all_input_nodes if calls.output(node) is not None], [unit])
        for unit in units
    ])  # fmt: skip


def _behind_results(node: fx.Node) -> fx.Node:
    return node.all_input_nodes[0] if _is_result_of_several(node) else node


def _dtype(value: torch.Tensor | None) -> str:
    return "" if value is None else calls.dtype_name(value.dtype)


def operators_after(
    name: GraphName, units: Sequence[Unit], shapes: SymbolicShapes, profile: DeviceProfile
) -> tuple[list[records.Operator], list[records.Region]]:
    """One record for each launch of the planned program, and one for each region among them."""
    launches: list[records.Operator] = []
    regions: list[records.Region] = []
    maker = {value: unit.name for unit in units if isinstance(unit, Region) for value in unit.lowered.outputs}
    for index, (unit, distances) in enumerate(zip(units, _distances(units), strict=True)):
        if isinstance(unit, fx.Node):
            if unit.op != "get_attr" and not _is_result_of_several(unit):
                record = _operator(name, "after", index, unit, operator_cost(unit, shapes), shapes, profile, distances)
                reads = tuple(dict.fromkeys(maker.get(n, _behind_results(n).name) for n in unit.all_input_nodes))
                launches.append(replace(record, inputs=reads))
            continue
        region = _region(name, unit, shapes, profile, distances)
        regions.append(region)
        last = unit.lowered.outputs[-1].meta["val"]
        launches.append(
            records.Operator(
                graph=name,
                stage="after",
                index=index,
                name=unit.name,
                target="kernel",
                operator_class=calls.class_of(max(unit.members, key=lambda n: calls.class_of(n) == "reduction")),
                shape=calls.shape_of(last),
                dtype=_dtype(last),
                cost=region.cost,
                floor_us=region.floor_us,
                bound=region.bound,
                region=unit.name,
                source=source_line(unit.members[-1]),
                inputs=tuple(dict.fromkeys(maker.get(n, _behind_results(n).name) for n in unit.lowered.inputs)),
                predicted_us=region.predicted_us,
            )
        )
    return launches, regions


def _region(
    name: GraphName, region: Region, shapes: SymbolicShapes, profile: DeviceProfile, distances: Distances
) -> records.Region:
    cost = nest_cost(region.lowered, [operator_cost(n, shapes) for n in region.members], shapes)
    work = region_work(region.lowered)
    floor, bound = floor_of(cost, work.dtype, "pointwise", profile)
    return records.Region(
        graph=name,
        name=region.name,
        members=tuple(n.name for n in region.members),
        cost=cost,
        language=region.language,
        source_code=source_of(region.lowered),
        floor_us=floor,
        bound=bound,
        predicted_us=None if floor is None else _predicted_us(work, distances, profile),
        schedule=str(_schedule(region, profile)),
    )


def _schedule(region: Region, profile: DeviceProfile) -> Schedule:
    nest, device = region.lowered.nest, profile.limits
    if region.language == "c++":
        return cpu_schedule(nest)
    return schedule_of(nest, Limits.of(device.multiprocessors, device.shared_bytes_per_block) if device else Limits())


def works(plan: GraphPlan) -> Iterator[tuple[Unit, Work | None]]:
    """Each launch of a planned graph with its work; None if that is unknown."""
    shapes = symbolic_shapes(plan.graph, {}, {})
    for unit, distances in zip(plan.units, _distances(plan.units), strict=True):
        if isinstance(unit, Region):
            yield unit, replace(region_work(unit.lowered), distances=distances)
        elif unit.op == "call_function" and not is_view(unit):
            cost = operator_cost(unit, shapes)
            is_known = cost.provenance != "unknown" and cost.bytes
            yield unit, replace(call_work(unit, cost), distances=distances) if is_known else None


def kernels_us(units: Sequence[Unit], profile: DeviceProfile) -> float:
    """The predicted time of the generated kernels among the launches of a graph."""
    placed = [(unit, found) for unit, found in zip(units, _distances(units), strict=True) if isinstance(unit, Region)]
    return sum(_predicted_us(region_work(unit.lowered), found, profile) for unit, found in placed)


def with_predictions(
    decisions: Iterable[Decision], proposed: Iterable[Region], profile: DeviceProfile
) -> Iterator[Decision]:
    """The decisions with the predicted time of the kernel that each pair was proposed to be part of."""
    priced = [
        ({n.name for n in r.members}, predicted_us(region_work(r.lowered), profile))
        for r in proposed
        if len(r.members) > 1
    ]
    for decision in decisions:
        pair = {decision.producer, decision.consumer}
        yield replace(decision, predicted_us=next((us for members, us in priced if pair <= members), None))
