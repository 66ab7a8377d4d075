"""Recipes of operators whose row has a body in the loop language: one generated kernel, as in a compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from tilewright.emit.source import source_of
from tilewright.kernels.device import runs_triton
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.launch.generated import TritonKernel
from tilewright.loops.lower import Lowered, lower
from tilewright.operators.axes import Unfusable
from tilewright.records.recipe import Recipe


def generated(operator: Any, fake: Callable[..., Any]) -> Callable[..., Recipe | None]:
    """The recipes of `operator`, an overload of `torch.ops`; `fake` gives its results without elements.

    A call has none where Triton's kernels do not run, for empty tensors, and where one nest cannot hold the body.
    """

    def recipe(call: RecipeBuilder, *arguments: Any) -> Recipe | None:
        if not all(runs_triton(x) and x.numel() for x in call.inputs):
            return None
        graph = fx.Graph()
        nodes = {x: _placeholder(graph, x) for x in call.inputs}
        given = [nodes[x] if isinstance(x, Operand) else x for x in arguments]
        node = graph.call_function(operator, tuple(given))
        node.meta["val"] = fake(*map_arg(given, lambda x: x.meta["val"]))
        try:
            lowered, results = _lowered(graph, node)
        except Unfusable:
            return None
        made = {result: call.empty(x.shape, x.dtype, x.stride()) for result in results for x in (result.meta["val"],)}
        kernel = TritonKernel(lowered.nest, source_of(lowered))
        chosen = kernel.plan(call.device)
        scratch = [call.empty((size,), getattr(torch, dtype)) for size, dtype in chosen.scratch]
        held = {node: x for x, node in nodes.items()} | made
        tensors = [held[node] for node in (*lowered.inputs, *lowered.outputs)]
        for function, programs, options in kernel.launches(chosen):
            call.launch(function, (programs,), *tensors, *scratch, *kernel.numbers(), **options)
        return call.finish(*made.values())

    return recipe


def _placeholder(graph: fx.Graph, x: Operand) -> fx.Node:
    node = graph.placeholder(f"x{x.index}")
    node.meta["val"] = torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta")
    return node


def _lowered(graph: fx.Graph, node: fx.Node) -> tuple[Lowered, list[fx.Node]]:
    """The nest of one operator, and its results, of which a nest holds those that have elements."""
    found, results = node.meta["val"], [node]
    if isinstance(found, tuple):
        results = [graph.call_function(getitem, (node, place)) for place in range(len(found))]
        for result, value in zip(results, found, strict=True):
            result.meta["val"] = value
    outputs = [result for result in results if result.meta["val"].numel()]
    name = str(node.target).split(".")[1]
    return lower(list(dict.fromkeys([node, *outputs])), outputs, name, "triton"), results
