"""Operators whose kernels are recipes: built from metadata, kept for calls of the same kind, performed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tilewright.kernels.device import current
from tilewright.kernels.eager import are_launches_in_python
from tilewright.kernels.launches import drawn, launch
from tilewright.launch import twin
from tilewright.launch.builder import Operand, RecipeBuilder, operands_of
from tilewright.records.recipe import Recipe

RecipeOf = Callable[..., Recipe | None]
"""The recipe of a call, from a builder and the operator's arguments, operands in place of tensors; None where other
code than kernels takes the call."""
RECIPES: dict[str, RecipeOf] = {}
"""By full name of the operator, `tilewright::softmax`."""
KEPT = 4096
"""Recipes that are kept, of all operators."""


def by_recipe(name: str, recipe: RecipeOf, otherwise: Callable[..., Any], has_one_result: bool) -> Callable[..., Any]:
    """The implementation of an operator: its recipe performed; `otherwise` where it has none."""

    @functools.wraps(otherwise)
    def run(*arguments: Any) -> Any:
        results = performed(name, recipe, *arguments)
        if results is None:
            return otherwise(*arguments)
        # PyTorch takes None for no results.
        return results[0] if has_one_result else results or None

    return run


def performed(name: str, recipe: RecipeOf, *arguments: Any) -> tuple[torch.Tensor, ...] | None:
    """The results of the recipe for these arguments; None where there is none.

    Nor is there one that draws, in a CUDA graph that is being captured: each replay has to draw anew.
    """
    tensors = [x for x in arguments if isinstance(x, torch.Tensor)]
    operands = iter(operands_of(tensors))
    known = [next(operands) if isinstance(x, torch.Tensor) else x for x in arguments]
    # Who watches launches may watch what is built for them too.
    build = _built.__wrapped__ if are_launches_in_python() else _built
    with current(tensors[0]):
        made = build(name, recipe, *known)
        if made is None or (made.advance and torch.cuda.is_current_stream_capturing()):
            return None
        return twin.perform(made, tensors, by_triton=launch, drawn=drawn)


def perform_part(name: str, recipe: Callable[..., Recipe], *arguments: Any) -> tuple[torch.Tensor, ...]:
    """The results of a recipe for the kernels of an operator that does other things too."""
    results = performed(name, recipe, *arguments)
    assert results is not None
    return results


@functools.lru_cache(KEPT, typed=True)
def _built(name: str, recipe: RecipeOf, *arguments: Any) -> Recipe | None:
    operands = [x for x in arguments if isinstance(x, Operand)]
    return recipe(RecipeBuilder(name, operands, compiled=False), *arguments)


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
