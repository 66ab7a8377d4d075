"""Backward graphs without the gradients that autograd leaves undefined, such as that of logits beside a loss.

For an undefined gradient autograd materialises zeros, as large as the logits, which backward would add. Here it passes
None, and backward is compiled without that gradient. If one comes after all, backward is compiled again, with all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

if TYPE_CHECKING:
    from tilewright.graph.capture import Boxed


def is_tangent(node: fx.Node) -> bool:
    """Whether this is an incoming gradient of a joint or backward graph."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def expected_undefined(backward: fx.Graph) -> list[int]:
    """The places, among the inputs, of gradients that a training step does not give: all but those of its losses.

    A loss has no dimensions. Where no result is one, all gradients are expected.
    """
    inputs = list(enumerate(backward.find_nodes(op="placeholder")))
    found = {place: node.meta.get("val") for place, node in inputs if is_tangent(node)}
    if not all(isinstance(value, torch.Tensor) and _has_numbers(value) for value in found.values()):
        return []
    others = [place for place, value in found.items() if value.dim()]
    return others if len(others) < len(found) else []


def tangents_of(backward: fx.Graph) -> dict[int, torch.Tensor]:
    """The incoming gradients of a backward graph: what each is, by its place among the inputs."""
    inputs = enumerate(backward.find_nodes(op="placeholder"))
    return {place: node.meta["val"] for place, node in inputs if is_tangent(node)}


def _has_numbers(value: torch.Tensor) -> bool:
    """Whether its sizes and strides are no symbols."""
    return all(isinstance(number, int) for number in (*value.shape, *value.stride()))


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own with the same nodes and metadata."""
    graph = fx.Graph()
    result = graph.output(graph.graph_copy(module.graph, {}))
    result.meta = dict(module.graph.output_node().meta)
    return fx.GraphModule(module, graph)


def leave_undefined(results: Iterable[object]) -> None:
    """Let autograd hand None to the backward of a compiled graph for each of its results without a gradient."""
    for result in results:
        node = result.grad_fn if isinstance(result, torch.Tensor) else None
        if type(node).__name__ == "CompiledFunctionBackward":
            # The function's own `ctx.set_materialize_grads`; all results share the node.
            node.materialize_grads = False  # type: ignore[union-attr]
            return


class BackwardByGradients:
    """Runs a backward graph without the gradients `undefined`, or the one with all as soon as one of them comes.

    `tangents` are all incoming gradients by place. `without` takes the arguments but for those that are undefined;
    `compile_whole` makes the other graph when it is needed first.
    """

    _boxed_call = True

    def __init__(
        self,
        tangents: Mapping[int, torch.Tensor],
        undefined: Sequence[int],
        without: Boxed,
        compile_whole: Callable[[], Boxed],
    ) -> None:
        self.tangents = tangents
        self.undefined = frozenset(undefined)
        self.without = without
        self.compile_whole = compile_whole
        self.whole: Boxed | None = None

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        missing = {place for place in self.tangents if args[place] is None}
        is_expected = self.undefined <= missing
        for place in missing - self.undefined if is_expected else missing:
            args[place] = _zeros(self.tangents[place])
        if is_expected:
            given = [value for place, value in enumerate(args) if place not in self.undefined]
            args.clear()
            return self.without(given)
        if self.whole is None:
            self.whole = self.compile_whole()
        return self.whole(args)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()
