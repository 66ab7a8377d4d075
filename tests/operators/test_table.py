"""Every row of the operator table with a body, compiled and compared with eager and float64."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import fx

from tests.operators.samples import CALLS, VIEWS, Call, Operands, combinations
from tilewright.emit.cpp import emit_cpp, translation_unit
from tilewright.measure.contract import compare
from tilewright.measure.reference import reference_run
from tilewright.operators import table
from tilewright.passes.fusion import fuse
from tilewright.passes.schedule import schedule
from tilewright.runtime.assemble import Scheduled, assemble
from tilewright.runtime.compiler import load
from tilewright.records.measurement import Verified


@dataclass(frozen=True)
class Checked:
    """One result of one call."""

    label: str
    kernel: str | None
    """The kernel that computed it, or None where PyTorch did."""
    row: Verified


class Program:
    """Calls of many operators as one graph, compiled by one call of the compiler."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.output_at = self.graph.create_node("placeholder", "nothing")
        self.output_at.meta["val"] = None
        self.inputs: dict[int, tuple[fx.Node, torch.Tensor]] = {}
        self.results: list[tuple[str, str, fx.Node]] = []

    def tensor(self, value: torch.Tensor) -> fx.Node:
        if id(value) not in self.inputs:
            with self.graph.inserting_before(self.output_at):
                node = self.graph.placeholder(f"in{len(self.inputs)}")
            node.meta["val"] = value
            self.inputs[id(value)] = node, value
        return self.inputs[id(value)][0]

    def call(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        node.meta["val"] = value
        return node

    def operator(self, name: str, label: str, call: Call, view: bool) -> None:
        target = overload(name)
        args, kwargs = call
        if view:
            args = (-args[0], *args[1:])
        value = target(*args, **kwargs)
        nodes = fx.node.map_aggregate(args, lambda a: self.tensor(a) if isinstance(a, torch.Tensor) else a)
        if view:
            neg = self.call(torch.ops.aten.neg.default, (self.tensor(call[0][0]),), {}, args[0])
            nodes = (neg, *nodes[1:])
        node = self.call(target, nodes, kwargs, value)
        if view:
            node = self.call(torch.ops.aten.neg.default, (node,), {}, -value)
        many = value if isinstance(value, (tuple, list)) else None
        for i, part in enumerate(many or [value]):
            if isinstance(part, torch.Tensor):
                got = node if many is None else self.call(operator.getitem, (node, i), {}, part)
                self.results.append((name, label, got))

    def run(self) -> Iterator[tuple[str, Checked]]:
        self.graph.erase_node(self.output_at)
        self.graph.output(tuple(node for _, _, node in self.results))
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        fusion = fuse(self.graph, "forward")
        units = schedule(self.graph, fusion.regions)
        library = load(translation_unit([emit_cpp(r.lowered.nest) for r in fusion.regions]))
        inputs = [value for _, value in self.inputs.values()]
        ours = assemble(Scheduled(self.graph, units), library)(list(inputs))
        pairs = reference_run(module, inputs)
        kernel_of = {node: r.name for r in fusion.regions for node in r.lowered.outputs}
        for (name, label, node), mine, pair in zip(self.results, ours, pairs, strict=True):
            yield name, Checked(label, kernel_of.get(node), compare(mine, pair.eager, pair.truth, tensor=label))
