"""Launches of kernels that are generated for a call, as in a compiled graph, and recipes of operators whose row has a
body in the loop language.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from tilewright.emit.source import source_of
from tilewright.kernels.device import runs_triton
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.launch.generated import TritonKernel
from tilewright.loops.lower import lower
from tilewright.operators.axes import Unfusable
from tilewright.records.recipe import Recipe


def generated(operator: Any, fake: Callable[..., Any]) -> Callable[..., Recipe | None]:
    """The recipes of `operator`, an overload of `torch.ops`; `fake` gives its results without elements.

    A call has none where Triton's kernels do not run, for empty tensors, and where one nest cannot hold the body.
    """
    name = str(operator).split(".")[1]

    def recipe(call: RecipeBuilder, *arguments: Any) -> Recipe | None:
        if not all(runs_triton(x) and x.numel() for x in call.inputs):
            return None
        formula = Formula(call.inputs)
        node = formula.call(operator, *arguments, fake=fake)
        results = [node]
        if isinstance(node.meta["val"], tuple):
            results = [formula.call(getitem, node, place, fake=getitem) for place in range(len(node.meta["val"]))]
        try:
            return call.finish(*formula.launch(call, name, results))
        except Unfusable:
            return None

    return recipe


def _like_first(x: torch.Tensor, *_: object) -> torch.Tensor:
    return torch.empty_like(x)


class Formula:
    """Calls of operators on operands, which one generated kernel computes."""

    def __init__(self, inputs: Iterable[Operand]) -> None:
        self._graph = fx.Graph()
        self._nodes = {x: self._graph.placeholder(f"x{x.index}") for x in inputs}
        for x, node in self._nodes.items():
            node.meta["val"] = torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device="meta")

    def call(self, target: Any, *arguments: Any, fake: Callable[..., Any] = _like_first) -> fx.Node:
        """A call with operands and earlier calls as arguments; `fake` gives its results without elements."""
        given = [self._nodes[x] if isinstance(x, Operand) else x for x in arguments]
        node = self._graph.call_function(target, tuple(given))
        node.meta["val"] = fake(*map_arg(given, lambda x: x.meta["val"]))
        return node

    def launch(
        self, call: RecipeBuilder, name: str, results: Sequence[fx.Node], into: Sequence[Operand] = ()
    ) -> list[Operand]:
        """Launch the kernel `name` of these results, and return them; they are written to `into` if that is given.

        Raises Unfusable if one nest cannot hold them.
        """
        outputs = [result for result in results if result.meta["val"].numel()]
        members = [node for node in self._graph.nodes if node.op == "call_function"]
        unread = set(results) - set(outputs)
        lowered = lower([node for node in members if node not in unread], outputs, name, "triton")
        given = into or [call.empty(x.shape, x.dtype, x.stride()) for x in (result.meta["val"] for result in results)]
        made = dict(zip(results, given, strict=True))
        kernel = TritonKernel(lowered.nest, source_of(lowered))
        chosen = kernel.schedule(call.device)
        scratch = [call.empty((size,), getattr(torch, dtype)) for size, dtype in chosen.scratch]
        held = {node: x for x, node in self._nodes.items()} | made
        tensors = [held[node] for node in (*lowered.inputs, *lowered.outputs)]
        for function, programs, options in kernel.launches(chosen):
            call.launch(function, (programs,), *tensors, *scratch, *kernel.numbers(chosen, lowered.numbers), **options)
        return list(made.values())
