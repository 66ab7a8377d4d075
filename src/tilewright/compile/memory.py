"""Live bytes over a graph, as eager runs it and as it is planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from tilewright.cost.memory import MemoryStep, live_bytes, storage
from tilewright.cost.operators import scratch_bytes
from tilewright.graph.undefined import is_tangent
from tilewright.passes.fusion import Region
from tilewright.passes.schedule import Unit
from tilewright.records import program as records
from tilewright.records.program import GraphName
from tilewright.runtime.assemble import Scheduled, taken_over


def eager_steps(graph: fx.Graph) -> list[MemoryStep]:
    """One step for each operator: it reads its operands and leaves its result."""
    return [_call(node) for node in graph.nodes if node.op == "call_function"]


def _call(node: fx.Node) -> MemoryStep:
    return MemoryStep(node.name, tuple(node.all_input_nodes), (node,), scratch=scratch_bytes(node))


def planned_steps(graph: fx.Graph, units: Sequence[Unit]) -> list[MemoryStep]:
    """One step for each launch of the plan, whose results may take over an operand's storage."""
    over = taken_over(Scheduled(graph, list(units)))
    return [
        MemoryStep(
            unit.name,
            unit.lowered.inputs,
            unit.lowered.outputs,
            replaces=tuple(over[node] for node in unit.lowered.outputs if node in over),
        )
        if isinstance(unit, Region)
        else _call(unit)
        for unit in units
    ]


def memory(
    name: GraphName, stage: records.Stage, graphs: Mapping[GraphName, fx.Graph], steps: Sequence[MemoryStep]
) -> list[records.MemoryPoint]:
    """Live bytes without tensors that the caller owns: saved tensors count, parameters and inputs do not."""
    graph = graphs[name]
    forward = {n.name: n for n in graphs["forward"].nodes}
    # What forward is given are parameters and inputs; backward is given some of them, gradients, and saved tensors.
    given = {n.name for n in graphs["forward"].find_nodes(op="placeholder")}
    saved = [n for n in graph.find_nodes(op="placeholder") if n.name not in given and not is_tangent(n)]
    # Backward also gets views, which share memory with results of forward or with the caller's tensors.
    made = {node: storage(forward.get(node.name, node)) for node in saved}
    standing = {storage: node for node, storage in reversed(made.items())}
    same = {node: standing[storage] for node, storage in made.items()}
    inputs = [node for node in saved if made[node].name not in given]
    points = live_bytes(steps, inputs, graph.output_node().all_input_nodes, same)
    return [
        records.MemoryPoint(name, stage, index, step.name, live)
        for index, (step, live) in enumerate(zip(steps, points, strict=True))
    ]
