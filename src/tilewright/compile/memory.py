"""Live bytes over a graph, as eager runs it and as it is planned."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import fx

from tilewright.cost.memory import MemoryStep, live_bytes, storage
from tilewright.cost.operators import scratch_bytes
from tilewright.passes.fusion import Region
from tilewright.passes.schedule import Unit
from tilewright.records import program as records
from tilewright.records.program import GraphName
from tilewright.runtime.assemble import Scheduled, taken_over

HELD_NAME = re.compile(r"(primals|tangents)_\d+$|arg\d+_\d+$")
"""Placeholders that the caller owns: parameters, inputs and gradients of results."""


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
    saved = [n for n in graph.nodes if n.op == "placeholder" and not HELD_NAME.match(n.name)]
    # Backward also gets views, which share memory with results of forward or with the caller's tensors.
    made = {node: storage(forward.get(node.name, node)) for node in saved}
    standing = {storage: node for node, storage in reversed(made.items())}
    same = {node: standing[storage] for node, storage in made.items()}
    inputs = [node for node in saved if not HELD_NAME.match(made[node].name)]
    points = live_bytes(steps, inputs, graph.output_node().all_input_nodes, same)
    return [
        records.MemoryPoint(name, stage, index, step.name, live)
        for index, (step, live) in enumerate(zip(steps, points, strict=True))
    ]
