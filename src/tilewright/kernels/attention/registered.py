"""The PyTorch operators `tilewright::attention` and `tilewright::attention_backward`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tilewright.kernels.attention import dispatch
from tilewright.kernels.attention.request import Mask, Operands, Request, TensorLike, strides_of
from tilewright.kernels.by_recipe import RECIPES
from tilewright.kernels.registration import define
from tilewright.launch.builder import RecipeBuilder
from tilewright.records.recipe import Recipe

_TENSORS = 4
"""Of the options after q, k and v, the first: mask, slopes, starts_q, starts_k."""


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
        deterministic, q.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest",
    )  # fmt: skip


Results = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]
"""out, lse, what backward takes for lse in fp32 (else empty), seed and offset of a dropout mask (else empty)."""


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Results:
    """The operator below autograd."""
    q, k, v = (dispatch.with_aligned_rows(x) for x in (q, k, v))
    request = request_of(q, k, v, *options[:-1])
    state = dispatch.draw_dropout_state(request, q) if request.dropout else None
    mask, slopes, starts_q, starts_k = options[:_TENSORS]
    operands = Operands(q, k, v, mask, slopes, starts_q, starts_k, state)
    out, lse, lse64 = dispatch.forward(request, operands, options[-1])
    lse64 = lse.new_empty(0, dtype=torch.float64) if lse64 is None else lse64
    return out, lse, lse64, lse.new_empty(0, dtype=torch.int64) if state is None else state


def _forward_fake(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *options: Any) -> Results:
    shape, strides = dispatch.strides_like(q, v.shape[3])
    drops = options[8] > 0.0
    return (
        torch.empty_strided(shape, strides, dtype=q.dtype, device=q.device),
        torch.empty(q.shape[:3], dtype=torch.float32, device=q.device),
        torch.empty(q.shape[:3] if q.dtype == torch.float32 else 0, dtype=torch.float64, device=q.device),
        torch.empty(2 if drops else 0, dtype=torch.int64, device=q.device),
    )


def backward(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, lse64: torch.Tensor, state: torch.Tensor, *options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    q, k, v = (dispatch.with_aligned_rows(x) for x in (q, k, v))
    request = request_of(q, k, v, *options[:-1])
    mask, slopes, starts_q, starts_k = options[:_TENSORS]
    drawn = state if request.dropout else None
    operands = Operands(q, k, v, mask, slopes, starts_q, starts_k, drawn)
    exact = lse64 if q.dtype == torch.float32 else None
    return dispatch.backward(request, operands, out, lse, dout, exact, dlse, options[-1])


def _backward_fake(
    dout: torch.Tensor, dlse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any
) -> tuple[torch.Tensor, ...]:
    return tuple(dispatch.empty_gradient(x) for x in (q, k, v))


def save(ctx: Any, inputs: tuple[Any, ...], output: Results) -> None:
    """What `gradients` takes from the forward's arguments and results."""
    q, k, v, *options = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[2:])
    ctx.save_for_backward(q, k, v, *output, *options[:_TENSORS])
    ctx.options = options[_TENSORS:]


def gradients(
    run: Callable[..., tuple[torch.Tensor, ...]],
    ctx: Any,
    dout: torch.Tensor | None,
    dlse: torch.Tensor | None,
    *_: Any,
) -> tuple[torch.Tensor | None, ...]:
    """Of all that the operator takes, by `run`: the backward operator, or what it runs."""
    q, k, v, out, lse, lse64, state, *tensors = ctx.saved_tensors
    nothing = [None] * (_TENSORS + len(ctx.options))
    if dout is None and dlse is None:
        return None, None, None, *nothing
    dout = torch.zeros_like(out) if dout is None else dout
    dq, dk, dv = run(dout, dlse, q, k, v, out, lse, lse64, state, *tensors, *ctx.options)
    return dq, dk, dv, *nothing


def _forward_recipe(call: RecipeBuilder, *arguments: Any) -> Recipe | None:
    # Triton is loaded where there is something for it to do.
    from tilewright.kernels.attention import recipe

    return recipe.forward(call, *arguments)


def _backward_recipe(call: RecipeBuilder, *arguments: Any) -> Recipe | None:
    from tilewright.kernels.attention import recipe

    return recipe.backward(call, *arguments)


# For compiled graphs; `direct.py` has the eager calls.
RECIPES["tilewright::attention"] = _forward_recipe
RECIPES["tilewright::attention_backward"] = _backward_recipe
backward_operator = define(
    "attention_backward",
    backward,
    _backward_fake,
)
attend = define(
    "attention",
    forward,
    _forward_fake,
    backward=functools.partial(gradients, backward_operator),
    save=save,
)
