"""Calls of attention's Hopper kernels alone, on a GPU."""

import math
from unittest import mock

import torch

from tilewright.hardware.architectures import limits_of
from tilewright.kernels.attention.dispatch import aligned
from tilewright.kernels.attention.hopper import backward as hopper_backward
from tilewright.kernels.attention.hopper import recipe as hopper
from tilewright.kernels.attention.request import Request, strides_of
from tilewright.kernels.by_recipe import perform_part
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe

GPU = torch.device("cuda:0")
LENGTHS = [
    (1, 1), (3, 3), (113, 113), (203, 203), (1023, 1023), (1025, 1025), (799, 799), (128, 128), (512, 512),
    (113, 203), (203, 113), (1, 1023), (1023, 1), (799, 1025), (1023, 64), (384, 640), (3, 129),
]  # fmt: skip
BANDS: list[tuple[int | None, int | None]] = [(None, None), (None, 0), (100, 0), (64, 64), (None, 128), (0, None)]
"""How far a query sees back and ahead: everything, causal, windows."""


def tensors(
    queries: int,
    keys: int,
    size: int,
    dtype: torch.dtype,
    *,
    value_size: int | None = None,
    batch: int = 2,
    heads: tuple[int, int] = (4, 2),
    along: str = "bhsd",
    outliers: int = 3,
) -> tuple[torch.Tensor, ...]:
    """q, k, v and dout [batch, heads, positions, head size], some values thirty times as large, in memory `along`."""
    generator = torch.Generator(GPU).manual_seed(0)
    made, ahead = [], value_size or size
    for count, length, width in (
        (heads[0], queries, size), (heads[1], keys, size), (heads[1], keys, ahead), (heads[0], queries, ahead)
    ):  # fmt: skip
        sizes = {"b": batch, "h": count, "s": length, "d": width}
        x = torch.randn([sizes[axis] for axis in along], generator=generator, device=GPU)
        x.view(-1)[torch.randint(x.numel(), (outliers,), generator=generator, device=GPU)] *= 30
        made.append(x.to(dtype).permute([along.index(axis) for axis in "bhsd"]))
    return tuple(made)


def request_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    band: tuple[int | None, int | None] = (None, None),
    scale: float | None = None,
    softcap: float = 0.0,
) -> Request:
    """The call as plain data."""
    (batch, heads, queries, size), (_, kv_heads, keys, value_size) = q.shape, v.shape
    return Request(
        q.device, q.dtype, batch, heads, kv_heads, queries, keys, size, value_size, strides_of(q), strides_of(k),
        strides_of(v), aligned(q, k, v), 1 / math.sqrt(size) if scale is None else scale, *band, softcap,
    )  # fmt: skip


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
