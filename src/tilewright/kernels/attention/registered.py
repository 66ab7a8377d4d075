"""The PyTorch operators `tilewright::attention` and `tilewright::attention_backward`."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.kernels.attention import dispatch
from tilewright.kernels.attention.request import Mask, Request, TensorLike, strides_of
from tilewright.kernels.by_recipe import perform_part
from tilewright.kernels.registration import IMPLEMENTATIONS, define
from tilewright.launch.builder import RecipeBuilder
from tilewright.launch.eager import known_of
from tilewright.launch.gradient import Gradient, Input, OutputGrad, Saved
from tilewright.pytorch.state import float32_precision
from tilewright.records.recipe import Recipe

FORWARD, BACKWARD = "tilewright::attention", "tilewright::attention_backward"
ARGUMENTS = 16


def request_of(
    q: TensorLike, k: TensorLike, v: TensorLike, mask: TensorLike | None, slopes: TensorLike | None,
    starts_q: TensorLike | None, starts_k: TensorLike | None, scale: float, left: int | None, right: int | None,
    softcap: float, dropout: float, longest_q: int, longest_k: int, deterministic: bool,
) -> Request:  # fmt: skip
    """The call as plain data."""
    batch, heads, queries, head_size = q.shape
    _, kv_heads, keys, value_size = v.shape
    kind: Mask = "none" if mask is None else "boolean" if mask.dtype == torch.bool else "additive"
    return Request(
        q.device, q.dtype, batch, heads, kv_heads, queries, keys, head_size, value_size,
        strides_of(q), strides_of(k), strides_of(v), dispatch.aligned(q, k, v), scale, left, right, softcap,
        kind, slopes is not None, dropout, 0 if starts_q is None else starts_q.shape[0] - 1, longest_q, longest_k,
        deterministic, q.dtype == torch.float32 and float32_precision() != "highest",
    )  # fmt: skip


Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""out, lse, what backward takes for lse in fp32 (else empty), seed and offset of a dropout mask (else empty)."""


def _forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Results:
    """Runs calls without a recipe: empty tensors, or dropout whose numbers PyTorch draws."""
    out, lse, lse64, state = _forward_fake(q, k, v, *options)
    if 0 in (*q.shape, *k.shape[:3], v.shape[3]):
        return out.zero_(), lse.fill_(-torch.inf if k.shape[2] == 0 else 0.0), lse64, state
    from tilewright.kernels.attention import recipe

    request = request_of(q, k, v, *options[:-1])
    dispatch.select(request, options[-1], False)
    state = dispatch.draw_dropout_state(request, q)
    out, lse, lse64 = perform_part(FORWARD, recipe.forward_of_state, q, k, v, *options, state)
    return out, lse, lse64, state


def _forward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Results:
    shape, strides = dispatch.strides_like(q, v.shape[3])
    drops = options[8] > 0.0
    return (
        torch.empty_strided(shape, strides, dtype=q.dtype, device=q.device),
        torch.empty(q.shape[:3], dtype=torch.float32, device=q.device),
        torch.empty(q.shape[:3] if q.dtype == torch.float32 else 0, dtype=torch.float64, device=q.device),
        torch.empty(2 if drops else 0, dtype=torch.int64, device=q.device),
    )


def _backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Runs calls without a recipe: empty tensors, or queries that see one key each."""
    if 0 in (*dout.shape, *k.shape):
        dq, dk, dv = _backward_fake(dout, dlse, q, k, v)
        return dq.zero_(), dk.zero_(), dv.zero_()
    from tilewright.kernels.attention import recipe

    options = rest[4:]
    dispatch.select(request_of(q, k, v, *options[:-1]), options[-1], True)
    dq, dk, dv = perform_part(BACKWARD, recipe.gradients, dout, dlse, q, k, v, *rest)
    # The gradients of q and k are zero; the computed ones are rounding errors, or NaN, which is kept.
    return dq.mul_(0.0), dk.mul_(0.0), dv


def _backward_fake(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    return tuple(dispatch.empty_gradient(x) for x in (q, k, v))


def _forward_recipe(call: RecipeBuilder, *arguments: Any) -> Recipe | None:
    # Load Triton only if it has something to compute.
    from tilewright.kernels.attention import recipe

    return recipe.forward(call, *arguments)


def _backward_recipe(call: RecipeBuilder, *arguments: Any) -> Recipe | None:
    from tilewright.kernels.attention import recipe

    return recipe.backward(call, *arguments)


backward_operator = define("attention_backward", _backward, _backward_fake, recipe=_backward_recipe)
attend = define(
    "attention",
    _forward,
    _forward_fake,
    gradient=Gradient(
        backward_operator,
        (
            OutputGrad(0),
            OutputGrad(1, is_optional=True),
            *map(Input, range(3)),
            *map(Saved, range(4)),
            *map(Input, range(3, ARGUMENTS)),
        ),
        (0, 1, 2, *[None] * (ARGUMENTS - 3)),
        differentiable=2,
    ),
    recipe=_forward_recipe,
)
forward, backward = IMPLEMENTATIONS[FORWARD], IMPLEMENTATIONS[BACKWARD]
"""Both operators below autograd."""
known = known_of(attend)
