"""Backward graphs without the gradients that autograd leaves undefined, such as that of logits beside a loss.

For an undefined gradient AOTAutograd materialises zeros, as large as the logits, which backward would add; an input
that no defined gradient reaches would have zeros for a gradient, or NaN, where eager's is None. Here autograd passes
None, and backward is compiled without that gradient: at once for those that a loss leaves undefined, else when first
they are.
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


def expected_undefined(tangents: Mapping[int, torch.Tensor]) -> list[int]:
    """The places of gradients that a training step does not give: all but those of its losses.

    A loss has no dimensions. Where no result is one, all gradients are expected.
    """
    others = [place for place, value in tangents.items() if value.dim()]
    return others if len(others) < len(tangents) else []


def tangents_of(backward: fx.Graph) -> dict[int, torch.Tensor]:
    """The incoming gradients of a backward graph that can be undefined: what each is, by its place among the inputs.

    None of one that is alone, since backward does not run without it, or where sizes are symbolic.
    """
    inputs = enumerate(backward.find_nodes(op="placeholder"))
    found = {place: node.meta.get("val") for place, node in inputs if is_tangent(node)}
    are_known = all(isinstance(value, torch.Tensor) and _has_numbers(value) for value in found.values())
    return found if are_known and len(found) > 1 else {}


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
    """Runs a backward graph without those incoming gradients that autograd leaves undefined.

    `tangents` are all incoming gradients by place; `compiled`, for the places of undefined gradients, takes the other
    arguments. `compile_without` makes it when it is needed first, or gives None where the graph needs zeros there.
    """

    _boxed_call = True

    def __init__(
        self,
        tangents: Mapping[int, torch.Tensor],
        compiled: Mapping[frozenset[int], Boxed],
        compile_without: Callable[[frozenset[int]], Boxed | None],
    ) -> None:
        self.tangents = tangents
        self.compiled: dict[frozenset[int], Boxed | None] = dict(compiled)
        self.compile_without = compile_without

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        undefined = frozenset(place for place in self.tangents if args[place] is None)
        if undefined not in self.compiled:
            self.compiled[undefined] = self.compile_without(undefined)
        run = self.compiled[undefined]
        if run is None:
            for place in undefined:
                args[place] = _zeros(self.tangents[place])
            return self(args)
        given = [value for place, value in enumerate(args) if place not in undefined]
        args.clear()
        return run(given)


def _zeros(like: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device).zero_()
