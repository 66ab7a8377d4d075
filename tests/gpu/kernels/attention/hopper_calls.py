"""Calls of attention's Hopper kernels alone, on a GPU."""

from __future__ import annotations

import math
from unittest import mock

import torch

from tilewright.hardware.architectures import limits_of
from tilewright.kernels.attention.hopper import backward as hopper_backward
from tilewright.kernels.attention.hopper import recipe as hopper
from tilewright.kernels.attention.request import Request
from tilewright.kernels.by_recipe import perform_part
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe


def forward(request: Request, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out, in q's strides where it has q's shape, and lse, in memory that held NaN."""
    poison(q, v)
    strides = tuple(q.stride()) if request.head_size == request.value_size else None
    out, lse = perform_part("tilewright::attention", _forward, q, k, v, request, strides)
    return out, lse


def _forward(
    call: RecipeBuilder, q: Operand, k: Operand, v: Operand, request: Request, strides: tuple[int, ...] | None
) -> Recipe:
    out = call.empty((*q.shape[:3], v.shape[3]), q.dtype, strides)
    lse = call.empty(q.shape[:3], torch.float32)
    hopper.forward(call, request, limits_of(request.device), q, k, v, out, lse)
    return call.finish(out, lse)


def backward(
    request: Request,
    inputs: tuple[torch.Tensor, ...],
    out: torch.Tensor,
    lse: torch.Tensor,
    plan: hopper_backward.BackwardLaunches | None = None,
) -> tuple[torch.Tensor, ...]:
    """dq, dk and dv of (q, k, v, dout), in memory that held NaN; by a plan that is not the one that is chosen."""
    poison(*inputs)
    return perform_part("tilewright::attention_backward", _backward, *inputs, out, lse, request, plan)


def _backward(
    call: RecipeBuilder, q: Operand, k: Operand, v: Operand, dout: Operand, out: Operand, lse: Operand,
    request: Request, plan: hopper_backward.BackwardLaunches | None,
) -> Recipe:  # fmt: skip
    made, limits = [call.empty_like(x) for x in (q, k, v)], limits_of(request.device)
    plan = plan or hopper_backward.plan(request, limits)
    with mock.patch.object(hopper_backward, "plan", lambda *_: plan):
        hopper.backward(call, request, limits, q, k, v, out, lse, dout, *made)
    return call.finish(*made)


def poison(*like: torch.Tensor) -> None:
    """Memory that is handed out again, to results and scratch, holds NaN."""
    made = [torch.full_like(x, math.nan) for x in like for _ in range(2)]
    made.append(torch.full((4 * max(x.numel() for x in like),), math.nan, device=like[0].device))
    del made
