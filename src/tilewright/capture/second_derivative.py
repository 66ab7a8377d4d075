"""Derivatives of the gradients that a compiled backward gives: PyTorch runs the captured graph for them.

    (dx,) = torch.autograd.grad(run(x).sum(), x, create_graph=True)     compiled
    dx.norm().backward()                                                PyTorch

AOTAutograd differentiates once. The gradients of a backward with `create_graph=True` get a history here: who
differentiates them runs the captured graph, as PyTorch runs it, from the inputs of the call, and differentiates that
twice. A call remembers its inputs weakly, with their versions; from the first derivative on they are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.weak import TensorWeakRef

from tilewright.pytorch.state import compiled_autograd_is_on

REFUSED = "torch.compile with aot_autograd does not currently support double backward"
CHANGED = "an input of the call was freed or changed before"
Gradients = Sequence[torch.Tensor | None]


@dataclass(frozen=True)
class SecondDerivative:
    """Gives the gradients of a call their history."""

    run: Callable[..., Sequence[Any]]
    """The captured graph, run by PyTorch."""
    report: Callable[[], None]
    """Called before it runs; what it raises is the user's error."""
    obstacle: str = ""
    """Why it cannot run again."""

    def __call__(self, gradients: Gradients, inputs: Sequence[Any], incoming: Gradients) -> list[Any]:
        """The `gradients` that `incoming` ones gave, for each of the `inputs` (None: freed or changed since)."""
        given = [x.detach() for x in gradients if x is not None]
        operands = [x for x in (*inputs, *incoming) if isinstance(x, torch.Tensor)]
        if not given:
            return list(gradients)
        if not any(x.requires_grad for x in operands):
            # All that they depend on was freed: who differentiates them gets an error.
            operands.append(torch.empty(0, requires_grad=True))
        made = iter(_Gradients.apply(self, gradients, inputs, incoming, *given, *operands))  # type: ignore[no-untyped-call]
        return [None if x is None else next(made) for x in gradients]

    def watched(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """AOTAutograd's callable; its gradients get a history."""

        def watching(*args: Any) -> Any:
            results = call(*args)
            # A result may be a view of an argument, which another compiled function gave.
            node = next((node for node in _compiled_nodes(results) if node not in _compiled_nodes(args)), None)
            if node is not None:
                node.register_hook(partial(self._hook, [*map(_remembered, args)]))
            return results

        return watching

    def _hook(self, inputs: Sequence[Callable[[], Any]], gradients: Gradients, incoming: Gradients) -> Any:
        if not torch.is_grad_enabled() or compiled_autograd_is_on():
            return None
        given, values = iter(gradients), [recall() for recall in inputs]
        # A node has gradients for tensors alone.
        found = self([None if is_number(x) else next(given) for x in values], values, incoming)
        return tuple(g for g, x in zip(found, values, strict=True) if not is_number(x))

    def differentiated(self, inputs: Sequence[Any], incoming: Gradients, places: Sequence[int]) -> list[Any]:
        """The gradients at these places among the inputs, with their histories."""
        results = self.run(*inputs)
        pairs = [(y, g) for y, g in zip(results, incoming, strict=True) if g is not None and y.requires_grad]
        return _grad(pairs, [inputs[place] for place in places], True)


class _Gradients(torch.autograd.Function):
    """Gradients as they are, as a function of the inputs of the call and the incoming gradients."""

    @staticmethod
    def forward(
        ctx: Any, second: SecondDerivative, gradients: Gradients, inputs: Any, incoming: Any, *tensors: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.second = second
        ctx.places = [place for place, x in enumerate(gradients) if x is not None]
        ctx.values = [[_TENSOR if isinstance(x, torch.Tensor) else x for x in some] for some in (inputs, incoming)]
        ctx.save_for_backward(*tensors[len(ctx.places) :])
        # Not `view_as`: a view of a function's input cannot be changed in place.
        return tuple(x.detach() for x in tensors[: len(ctx.places)])

    @staticmethod
    def backward(ctx: Any, *outer: torch.Tensor | None) -> Any:
        second: SecondDerivative = ctx.second
        (inputs, incoming), saved = ctx.values, ctx.saved_tensors
        why = second.obstacle or (CHANGED if any(x is None for x in inputs) else "")
        if why:
            raise RuntimeError(f"{REFUSED}: {why}")
        second.report()
        is_recorded = torch.is_grad_enabled()
        with torch.enable_grad():
            # Views, since one input may depend on another one.
            operands = [x.view_as(x) if x.requires_grad else x for x in saved]
            tensors = iter(operands)
            inputs, incoming = ([next(tensors) if x is _TENSOR else x for x in some] for some in (inputs, incoming))
            found = second.differentiated(inputs, incoming, ctx.places)
        both = zip(found, outer, strict=True)
        pairs = [(x, g) for x, g in both if x is not None and x.requires_grad and g is not None]
        made = iter(_grad(pairs, [x for x in operands if x.requires_grad], is_recorded))
        return (None,) * (4 + len(ctx.places)) + tuple(next(made) if x.requires_grad else None for x in operands)


_TENSOR = object()
"""In place of a tensor that is saved."""


def _grad(pairs: Sequence[tuple[Any, Any]], inputs: Sequence[Any], is_recorded: bool) -> list[Any]:
    """Gradients, from results and the gradients of each."""
    if not pairs:
        return [None] * len(inputs)
    results, gradients = zip(*pairs, strict=True)
    return list(torch.autograd.grad(results, inputs, gradients, create_graph=is_recorded, allow_unused=True))


def _compiled_nodes(values: Sequence[Any]) -> list[Any]:
    """AOTAutograd's nodes of tensors, and those of which a tensor is a view."""
    nodes = [x.grad_fn for x in values if isinstance(x, torch.Tensor) and x.grad_fn is not None]
    behind = (before for node in nodes for before, _ in node.next_functions)
    return [node for node in (*nodes, *behind) if type(node).__name__ == "CompiledFunctionBackward"]


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex))


def _remembered(value: Any) -> Callable[[], Any]:
    """Gives a number, or a tensor as it is now: None once it is freed or has changed."""
    if not isinstance(value, torch.Tensor):
        return lambda: value
    version, found = None if value.is_inference() else value._version, TensorWeakRef(value)

    def recall() -> torch.Tensor | None:
        x = found()
        return x if x is not None and version in (None, x._version) else None

    return recall
