"""Operators whose kernels are recipes: built from metadata, kept for calls of the same kind, performed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.kernels.device import current, interpreted, runs_triton
from tilewright.launch import twin
from tilewright.launch.builder import Operand, RecipeBuilder, operands_of
from tilewright.launch.eager import are_launches_in_python
from tilewright.pytorch.state import float32_precision
from tilewright.records.recipe import Recipe

RecipeOf = Callable[..., Recipe | None]
"""Makes the recipe of a call from a builder and the operator's arguments, with operands in place of tensors; gives None
if code other than kernels computes the call."""
RECIPES: dict[str, RecipeOf] = {}
"""By full name of the operator, `tilewright::softmax`."""


KEPT = 4096
"""The most recipes that are kept for calls from Python, over all operators."""


def by_triton(recipe: RecipeOf) -> RecipeOf:
    """`recipe` where Triton's kernels take the first operand; None elsewhere."""

    def of_call(call: RecipeBuilder, first: Operand, *arguments: Any) -> Recipe | None:
        return recipe(call, first, *arguments) if runs_triton(first) else None

    return of_call


def built(name: str, recipe: RecipeOf | None, *arguments: Any) -> Recipe | None:
    """The recipe of a call with these arguments, tensors among them; None where it has none.

    Its kernels are compiled, unless Triton launches them itself: in its interpreter, and where launches are captured.
    """
    operands = operands_of([x for x in arguments if isinstance(x, torch.Tensor)])
    if not operands or recipe is None:
        return None
    places = iter(operands)
    known = [next(places) if isinstance(x, torch.Tensor) else tuple(x) if isinstance(x, list) else x for x in arguments]
    build = _built.__wrapped__ if are_launches_in_python() else _built
    is_compiled = not interpreted() and not are_launches_in_python()
    with current(operands[0]):
        return build(name, recipe, is_compiled, float32_precision(), *known)


@functools.lru_cache(KEPT, typed=True)
def _built(name: str, recipe: RecipeOf, is_compiled: bool, _precision: str, *arguments: Any) -> Recipe | None:
    operands = [x for x in arguments if isinstance(x, Operand)]
    return recipe(RecipeBuilder(name, operands, compiled=is_compiled), *arguments)


def performed(name: str, recipe: RecipeOf | None, *arguments: Any) -> tuple[torch.Tensor, ...] | None:
    """The results of the recipe for these arguments, from Python; None where there is none.

    None also for a recipe that draws while a CUDA graph is being captured, since each replay has to draw anew.
    """
    made = built(name, recipe, *arguments)
    if made is None or (made.advance and torch.cuda.is_current_stream_capturing()):
        return None
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    with current(tensors[0]):
        return twin.perform(made, tensors)


def perform_part(name: str, recipe: RecipeOf, *arguments: Any) -> tuple[torch.Tensor, ...]:
    """The results of a recipe for the kernels of an operator that does other things too."""
    results = performed(name, recipe, *arguments)
    assert results is not None
    return results


def compiled_recipe(name: str, operands: Sequence[Operand], arguments: Sequence[Any]) -> Recipe | None:
    """The recipe of the operator `name` for the executor; None where it has none for these arguments.

    `operands` are all tensors among the arguments, each once, numbered from 0. A kernel that does not compile raises
    CompilerError.
    """
    recipe = RECIPES.get(name)
    if recipe is None or not operands:
        return None
    with current(operands[0]):
        return recipe(RecipeBuilder(name, operands, compiled=True), *arguments)
