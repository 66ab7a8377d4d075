"""The gradient of an operator as one call of another operator, as plain data for PyTorch and for the executor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class OutputGrad:
    """The gradient of a result."""

    result: int
    is_optional: bool = False
    """Whether an undefined gradient is passed as None; otherwise as zeros, for which the result is saved, too."""


@dataclass(frozen=True)
class Input:
    """An argument of the forward."""

    argument: int


@dataclass(frozen=True)
class HasInput:
    """Whether an argument of the forward is not None."""

    argument: int


@dataclass(frozen=True)
class Saved:
    """A result of the forward."""

    result: int


@dataclass(frozen=True)
class Gradient:
    """A gradient as one operator call; `torch.library.register_autograd` and native/gradient.h run it alike."""

    operator: Callable[..., Any]
    """The operator that computes it, as `registration.define` returns it."""
    takes: tuple[Any, ...]
    """Its arguments: each an `OutputGrad`, an `Input`, a `HasInput`, a `Saved`, or a constant."""
    gives: tuple[int | None, ...]
    """For each argument of the forward, the index of its gradient among the results of `operator`."""
    differentiable: int = 1
    """How many results of the forward, counted from the first, have a gradient."""

    def save(self, ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the values that `takes` refers to."""
        results = output if isinstance(output, tuple) else (output,)
        ctx.mark_non_differentiable(*results[self.differentiable :])
        ctx.set_materialize_grads(False)
        values = [_value(taken, inputs, results) for taken in self.takes]
        ctx.save_for_backward(*(x if isinstance(x, torch.Tensor) else None for x in values))
        ctx.values = [None if isinstance(x, torch.Tensor) else x for x in values]
        ctx.are_tensors = [isinstance(x, torch.Tensor) for x in inputs]

    def backward(self, ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The gradients of all arguments; None for an argument without one."""
        if all(gradient is None for gradient in gradients):
            return (None,) * len(self.gives)
        saved = ctx.saved_tensors
        arguments = [value if tensor is None else tensor for value, tensor in zip(ctx.values, saved, strict=True)]
        for place, taken in enumerate(self.takes):
            if isinstance(taken, OutputGrad):
                arguments[place] = gradients[taken.result]
                if arguments[place] is None and not taken.is_optional:
                    arguments[place] = torch.zeros_like(saved[self.takes.index(Saved(taken.result))])
        results = self.operator(*arguments)
        if isinstance(results, torch.Tensor):
            results = (results,)
        pairs = zip(self.gives, ctx.are_tensors, strict=True)
        return tuple(results[place] if place is not None and is_tensor else None for place, is_tensor in pairs)

    def as_data(self, name: str) -> tuple[Any, ...]:
        """The gradient as the executor reads it; `name` is that of the node in autograd's graph."""
        takes = [_as_data(taken) for taken in self.takes]
        gives = [-1 if place is None else place for place in self.gives]
        return name, self.operator, takes, gives, self.differentiable


GRAD, GIVEN, IS_GIVEN, KEPT, CONSTANT = range(5)
"""Kinds of arguments, as in native/gradient.h."""


def _as_data(taken: Any) -> tuple[int, int, Any]:
    match taken:
        case OutputGrad(result, is_optional):
            return GRAD, result, is_optional
        case Input(argument):
            return GIVEN, argument, None
        case HasInput(argument):
            return IS_GIVEN, argument, None
        case Saved(result):
            return KEPT, result, None
    return CONSTANT, 0, taken


def _value(taken: Any, inputs: tuple[Any, ...], results: tuple[torch.Tensor, ...]) -> Any:
    match taken:
        case OutputGrad():
            return None
        case Input(argument):
            return inputs[argument]
        case HasInput(argument):
            return inputs[argument] is not None
        case Saved(result):
            return results[result]
    return taken
