"""Races tilewright's attention kernels against PyTorch's on a GPU and keeps the outcome for all processes.

`raced` reads kept outcomes; `race` measures missing ones.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tilewright.launch.race_key import race_key
from tilewright.measure.timing.contest import contest
from tilewright.pytorch.state import in_real_tensors
from tilewright.records import outcomes
from tilewright.records.outcomes import Outcome

if TYPE_CHECKING:
    from tilewright.kernels.attention.request import Request

THEIRS, OURS = "pytorch", "tilewright"
MADE_FROM = ("kernels/attention",)


def raced(request: Request, training: bool) -> tuple[float, float] | None:
    """Kept microseconds of tilewright's kernels and of PyTorch's; None if they were not raced."""
    outcome = outcomes.lookup(_key(request, training))
    if outcome is None:
        return None
    # The outcome has no time for kernels whose results were wrong.
    return outcome.times_us.get(OURS, math.inf), outcome.times_us[THEIRS]


def race(request: Request, training: bool) -> tuple[float, float] | None:
    """As `raced`, but races on random operands if no outcome is kept. None on a CPU."""
    if request.device.type != "cuda":
        return None
    if outcomes.lookup(_key(request, training)) is None:
        with in_real_tensors(), torch.cuda.device(request.device):
            outcomes.keep(_key(request, training), _race(request, training))
    return raced(request, training)


def _key(request: Request, training: bool) -> str:
    asked = request._replace(device=torch.device("meta")), training
    return race_key(("attention", str(asked)), request.device, MADE_FROM)


def _race(request: Request, training: bool) -> Outcome:
    """Time both on random operands: the forward, and in training the backward with it."""
    from tilewright.kernels.attention import registered
    from tilewright.kernels.attention.dispatch import strides_like

    q, k, v = _operands(request, training)
    mask = _mask(request)
    shared = request.heads != request.kv_heads
    causal = request.right is not None
    options = (None, None, None, request.scale, None, request.right, 0.0, 0.0, 0, 0, request.deterministic, "auto")
    expanded = None if mask is None else mask.expand(*q.shape[:3], k.shape[2])
    own = torch.Generator(q.device).manual_seed(1)
    grad = torch.empty_strided(*strides_like(q, request.value_size), dtype=q.dtype, device=q.device)
    grad.normal_(generator=own)

    def ours() -> object:
        with torch.no_grad():
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

    return contest({THEIRS: pytorch, OURS: ours}, request.device)


def _operands(request: Request, training: bool) -> list[torch.Tensor]:
    """Random q, k and v with the strides of the request."""
    r = request
    shapes = (
        ((r.batch, r.heads, r.queries, r.head_size), r.q_strides),
        ((r.batch, r.kv_heads, r.keys, r.head_size), r.k_strides),
        ((r.batch, r.kv_heads, r.keys, r.value_size), r.v_strides),
    )
    own = torch.Generator(r.device).manual_seed(0)
    drawn = (torch.empty_strided(*lies, dtype=r.dtype, device=r.device).normal_(generator=own) for lies in shapes)
    return [x.requires_grad_(training) for x in drawn]


def _mask(request: Request) -> torch.Tensor | None:
    """A [queries, keys] mask of the request's kind that hides every eighth key; all heads share it, as is usual."""
    if request.mask == "none":
        return None
    visible = (torch.arange(request.keys, device=request.device) % 8 > 0).expand(request.queries, -1).contiguous()
    if request.mask == "boolean":
        return visible
    return torch.zeros_like(visible, dtype=request.dtype).masked_fill_(~visible, -torch.inf)
