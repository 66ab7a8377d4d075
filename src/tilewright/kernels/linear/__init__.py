"""A linear layer and its GELU, in one kernel or two by a race; a linear layer with dropout and residual."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F

from tilewright.kernels.arguments import expect_numbers, expect_tensors
from tilewright.kernels.by_recipe import perform_part
from tilewright.kernels.device import autocast, autocast_dtype
from tilewright.kernels.dropout_add import dropout_add
from tilewright.kernels.linear import cuda
from tilewright.kernels.registration import define
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.launch.race import Alternatives, Race, random_operand
from tilewright.records.recipe import Recipe, dense_strides

APPROXIMATIONS = ("none", "tanh")


def linear_gelu(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    approximate: Literal["none", "tanh"] = "none",
) -> torch.Tensor:
    """`gelu(x · weightᵀ + bias)`.

    Args:
        x: [..., in], floating point; made contiguous if it is not.
        weight: [out, in] of x's dtype and device; bias [out] or None.
        approximate: `none` for the error function, `tanh` for its approximation.

    Returns:
        [..., out] in x's dtype.

    Raises:
        ValueError: shapes, dtypes, devices or approximations that do not fit.

    In bf16 and fp16 on an H100 or H200, where the rows are multiples of 16 bytes, the product and what
    follows are one kernel (`cuda.cu`) or two of PyTorch's, whichever was measured as faster at these sizes
    (`fastest`); elsewhere two. Where a gradient is asked for, the value before the GELU is saved for the
    backward. Under autocast x, weight and bias are taken in its dtype.
    """
    expect_tensors("linear_gelu", x=x, weight=weight, bias=bias)
    x, weight, bias = autocast(x), autocast(weight), None if bias is None else autocast(bias)
    _check("linear_gelu", x, weight, bias)
    if approximate not in APPROXIMATIONS:
        raise ValueError(f"linear_gelu knows the approximations {', '.join(APPROXIMATIONS)}, not {approximate!r}")
    needed = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, weight, bias))
    rows = x.reshape(-1, x.shape[-1])
    y: torch.Tensor = _gelu(rows, weight, bias, approximate, needed)[0]
    return y.view(*x.shape[:-1], len(weight))


def linear_dropout_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    p: float = 0.5,
    training: bool = True,
) -> torch.Tensor:
    """`dropout(x · weightᵀ + bias, p, training) + residual`.

    Args:
        x: [..., in], floating point; made contiguous if it is not.
        weight: [out, in] of x's dtype and device; bias [out] or None.
        residual: [..., out] of x's dtype and device.
        p: the probability with which an element is dropped.

    Returns:
        [..., out] in x's dtype.

    Raises:
        ValueError: shapes, dtypes, devices that do not fit, or p outside of [0, 1].

    PyTorch's product, then `dropout_add` with its mask. Under autocast x, weight and bias are taken in its
    dtype; a residual of another is added in the wider of the two.
    """
    expect_tensors("linear_dropout_add", x=x, weight=weight, bias=bias, residual=residual)
    expect_numbers("linear_dropout_add", p=p)
    x, weight, bias = autocast(x), autocast(weight), None if bias is None else autocast(bias)
    _check("linear_dropout_add", x, weight, bias)
    if residual.dtype != x.dtype and autocast_dtype(x) is not None:
        return F.dropout(F.linear(x, weight, bias), p, training) + residual
    if residual.shape != (*x.shape[:-1], len(weight)) or (residual.dtype, residual.device) != (x.dtype, x.device):
        raise ValueError(
            f"linear_dropout_add takes a residual like its result, {[*x.shape[:-1], len(weight)]} {x.dtype} on "
            f"{x.device}, not {list(residual.shape)} {residual.dtype} on {residual.device}"
        )
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"linear_dropout_add takes a probability p in [0, 1], not {p}")
    return dropout_add(F.linear(x, weight, bias), residual, p, training=training)


def _check(name: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    tensors = [x, weight] if bias is None else [x, weight, bias]
    fits = x.dim() >= 1 and weight.dim() == 2 and x.shape[-1] == weight.shape[1]
    if not fits or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ValueError(f"{name} takes x [..., in], weight [out, in] and bias [out], not {shapes}")
    if not x.dtype.is_floating_point or len({(tensor.dtype, tensor.device) for tensor in tensors}) > 1:
        kinds = ", ".join(f"{tensor.dtype} on {tensor.device}" for tensor in tensors)
        raise ValueError(f"{name} takes tensors of one floating-point dtype on one device, not {kinds}")


def gelu_recipe(
    call: RecipeBuilder, x: Operand, weight: Operand, bias: Operand | None, approximate: str, keep: bool
) -> Recipe:
    """The result, and the value before the GELU (empty unless `keep`); `cuda.refuses` must be None for the operands."""
    epilogue: cuda.Epilogue = "gelu_tanh" if approximate == "tanh" else "gelu"
    return call.finish(*cuda.product(call, x, weight, bias, epilogue, keep=keep))


def _chosen_gelu_recipe(
    call: RecipeBuilder, x: Operand, weight: Operand, bias: Operand | None, approximate: str, keep: bool
) -> Recipe | None:
    if cuda.refuses(x, weight):
        return None
    impls = {
        "fused": lambda x, weight, bias: gelu_fused(x, weight, bias, approximate, keep),
        "apart": lambda x, weight, bias: gelu_apart(x, weight, bias, approximate, keep),
    }
    question = f"linear_gelu {approximate} {keep} {bias is None}"
    if fastest(question, (x, weight, bias), impls) != "fused":
        return None
    return gelu_recipe(call, x, weight, bias, approximate, keep)


def gelu_fused(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, approximate: str = "none", keep: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of `gelu_recipe` by tilewright's kernel; `cuda.refuses` must be None for the operands."""
    y, pre = perform_part("tilewright::linear_gelu", gelu_recipe, x, weight, bias, approximate, keep)
    return y, pre


def gelu_apart(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, approximate: str = "none", keep: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of `gelu_recipe` by two of PyTorch's kernels."""
    pre = F.linear(x, weight, bias)
    return F.gelu(pre, approximate=approximate), pre if keep else x.new_empty(0)


def _gelu_fake(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, approximate: str, keep: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    y = x.new_empty(x.shape[0], weight.shape[0])
    return y, torch.empty_like(y) if keep else x.new_empty(0)


def _gelu_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    x, weight, bias, approximate, _ = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.approximate, ctx.biased = approximate, bias is not None


def _gelu_backward(ctx: Any, dy: torch.Tensor | None, _: Any) -> tuple[torch.Tensor | None, ...]:
    if dy is None:
        return (None,) * 5
    x, weight, bias, pre = ctx.saved_tensors
    if torch.is_grad_enabled():
        # For a double backward `pre` must depend on the inputs.
        pre = F.linear(x, weight, bias)
    gradient = torch.ops.aten.gelu_backward.default(dy, pre, approximate=ctx.approximate)
    return (*_linear_backward(ctx, gradient, x, weight), None, None)


def _linear_backward(
    ctx: Any, gradient: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of x, weight and bias from that of x · weightᵀ + bias [M, N]."""
    needs = ctx.needs_input_grad
    dx = gradient @ weight if needs[0] else None
    dweight = gradient.t() @ x if needs[1] else None
    return dx, dweight, gradient.sum(0) if ctx.biased and needs[2] else None


_gelu = define(
    "linear_gelu", gelu_apart, _gelu_fake, backward=_gelu_backward, save=_gelu_save, recipe=_chosen_gelu_recipe
)


Impls = Mapping[str, Callable[..., object]]
Operands = Sequence[torch.Tensor | Operand | None]
MADE_FROM = ("kernels/linear",)


def fastest(operator: str, operands: Operands, impls: Impls) -> str:
    """The name of the fastest of `impls` for operands like these, the first of which are x [M, K] and weight [N, K].

    M is rounded up to a power of two. The first call with new sizes races the implementations on random tensors for
    half a second. Where nothing can be measured, new sizes get the first of `impls`.
    """
    x, weight = operands[:2]
    assert x is not None and weight is not None
    rows = 1 << (x.shape[0] - 1).bit_length()
    work = (operator, *impls, str(rows), *map(str, weight.shape), str(x.dtype))
    outcome = Race(work, x.device, MADE_FROM, functools.partial(_alternatives, operands, impls)).outcome()
    return next(iter(impls)) if outcome is None else outcome.fastest


def _alternatives(operands: Operands, impls: Impls) -> Alternatives:
    own = torch.Generator(next(x.device for x in operands if x is not None)).manual_seed(0)
    tensors = [None if x is None else random_operand(x.shape, dense_strides(x.shape), x.dtype, own) for x in operands]
    return {name: functools.partial(impl, *tensors) for name, impl in impls.items()}
