"""Races tilewright's attention kernels against PyTorch's on a GPU."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tilewright.kernels.offer import OURS, THEIRS
from tilewright.launch.race import Alternatives, Race, random_operand

if TYPE_CHECKING:
    from tilewright.kernels.attention.request import Request

MADE_FROM = ("kernels/attention",)


def attention_race(request: Request, training: bool) -> tuple[Race, ...]:
    """The forward, in training with the backward; none on a CPU."""
    if request.device.type != "cuda":
        return ()
    work = "attention", str((request._replace(device=torch.device("meta")), training))
    return (Race(work, request.device, MADE_FROM, partial(_alternatives, request, training)),)


def _alternatives(request: Request, training: bool) -> Alternatives:
    """Both on random operands."""
    from tilewright.kernels.attention import registered
    from tilewright.kernels.attention.dispatch import strides_like

    q, k, v = _operands(request, training)
    mask = _mask(request)
    shared = request.heads != request.kv_heads
    causal = request.right is not None
    options = (None, None, None, request.scale, None, request.right, 0.0, 0.0, 0, 0, request.deterministic, "auto")
    expanded = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    own = torch.Generator(q.device).manual_seed(1)
    grad = random_operand(*strides_like(q, request.value_size), q.dtype, own)

    def ours() -> object:
        results = registered.forward(q, k, v, expanded, *options)
        if training:
            return results[0], registered.backward(grad, None, q, k, v, *results, expanded, *options)
        return results[0]

    def pytorch() -> object:
        with torch.set_grad_enabled(training):
            out = F.scaled_dot_product_attention(
                q, k, v, mask, is_causal=causal, scale=request.scale, enable_gqa=shared
            )
            return (out, torch.autograd.grad(out, (q, k, v), grad)) if training else out

    return {THEIRS: pytorch, OURS: ours}


def _operands(request: Request, training: bool) -> list[torch.Tensor]:
    """Random q, k and v with the strides of the request."""
    r = request
    shapes = (
        ((r.batch, r.heads, r.queries, r.head_size), r.q_strides),
        ((r.batch, r.kv_heads, r.keys, r.head_size), r.k_strides),
        ((r.batch, r.kv_heads, r.keys, r.value_size), r.v_strides),
    )
    own = torch.Generator(r.device).manual_seed(0)
    drawn = (random_operand(*lies, r.dtype, own) for lies in shapes)
    return [x.requires_grad_(training) for x in drawn]


def _mask(request: Request) -> torch.Tensor | None:
    """A [queries, keys] mask of the request's kind that hides every eighth key; all heads share it, as is usual."""
    if request.mask == "none":
        return None
    visible = (torch.arange(request.keys, device=request.device) % 8 > 0).expand(request.queries, -1).contiguous()
    if request.mask == "boolean":
        return visible
    return torch.zeros_like(visible, dtype=request.dtype).masked_fill_(~visible, -torch.inf)
