"""How a kernel becomes a `torch.library` operator: schema, implementation, fake, autograd, in one call."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NoReturn

import torch

from tilewright.kernels.by_recipe import RECIPES, RecipeOf, built, performed
from tilewright.kernels.generated import generated
from tilewright.launch.eager import EagerOperator
from tilewright.launch.gradient import Gradient
from tilewright.operators.table import rows
from tilewright.pytorch.state import has_forward_level

_LIBRARY = torch.library.Library("tilewright", "FRAGMENT")
Operator = Callable[..., Any]
IMPLEMENTATIONS: dict[str, Operator] = {}
"""By full name, `tilewright::softmax`: the function that computes the operator below autograd."""


def define(
    name: str,
    implementation: Operator,
    fake: Operator,
    *,
    backward: Operator | None = None,
    save: Operator | None = None,
    gradient: Gradient | None = None,
    recipe: RecipeOf | None = None,
) -> Operator:
    """Register the operator of the row `tilewright.<name>`, and return what to call (positionally) for it.

    The row says its schema, and whether it is pure. An operator that is not pure and writes to no operand draws random
    numbers from PyTorch's generator, so no two of its calls may be merged and none dropped.

    `implementation` runs on every device and decides itself what it can do there; `fake` gives the
    results' shapes, dtypes and strides from fake tensors; `backward(ctx, *grads)` and
    `save(ctx, inputs, output)` are as in `torch.library.register_autograd`, and themselves call
    operators defined here, so that `torch.compile` and double tracing see through them. `gradient` stands for both
    where the gradient is one call of another operator. Without either a derivative raises NotImplementedError instead
    of being zero.

    `recipe(builder, *arguments)`, with operands in place of tensors, gives what kernels do for a call, or None where
    `implementation` takes it. In a compiled graph on a GPU the recipe is a step of the program. An operator whose row
    has a body needs none: its kernels are generated.
    """
    row = rows()[f"tilewright.{name}.default"]
    full = f"tilewright::{name}"
    draws = not row.pure and "!)" not in row.schema
    tags = (torch.Tag.pt2_compliant_tag, *((torch.Tag.nondeterministic_seeded,) if draws else ()))
    _LIBRARY.define(row.schema, tags=tags)
    operator = getattr(torch.ops.tilewright, name).default
    is_mutable = operator._schema.is_mutable
    if gradient is not None:
        backward, save = gradient.backward, gradient.save
    elif backward is None and not is_mutable:
        backward = without_derivative(name)
    if row.own and row.body is not None:
        recipe = generated(operator, fake)
    if recipe is not None:
        RECIPES[full] = recipe
    build, perform = functools.partial(built, full, recipe), functools.partial(performed, full, recipe)
    computed = gradient or (None if backward is None else (backward, save))
    eager = EagerOperator(operator, build, perform, implementation, computed)
    _LIBRARY.impl(name, _without_tangents(name, eager.below), "CompositeExplicitAutograd")
    IMPLEMENTATIONS[full] = eager.below
    torch.library.register_fake(full, fake, lib=_LIBRARY)
    if backward is not None:
        torch.library.register_autograd(full, backward, setup_context=save, lib=_LIBRARY)
    # Autograd needs the version counter of a tensor that is written to.
    return operator if is_mutable else eager.call


def without_derivative(name: str) -> Operator:
    """The `backward` of an operator that has none: it raises NotImplementedError."""
    what = "second derivative" if name.endswith("_backward") else "derivative"

    def refuse(ctx: Any, *gradients: Any) -> NoReturn:
        raise NotImplementedError(f"tilewright's {name} has no {what}; compute that part with PyTorch's operators")

    return refuse


def _without_tangents(name: str, implementation: Operator) -> Operator:
    """`implementation`, but it raises under forward-mode differentiation, where PyTorch would drop the tangents."""

    @functools.wraps(implementation)
    def run(*arguments: Any) -> Any:
        if has_forward_level():
            raise NotImplementedError(
                f"tilewright's {name} has no forward-mode derivative; compute that part with PyTorch's operators"
            )
        return implementation(*arguments)

    return run
