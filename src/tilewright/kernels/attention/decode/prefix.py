"""Attention of few queries to the first keys of a cache, whose number is in a tensor: `tilewright::attention_prefix`.

    n = prefix[b, 0, i, 0] + more             out[b, h, i] = softmax(scale · q[b, h, i] · k[b, h', :n]ᵀ) v[b, h', :n]

The device reads n, and no key behind the longest prefix. Without `prefix` all keys are seen. With `else_all`, a query
with an empty prefix sees all keys. `zeros`, int32, has at least one counter for each batch entry and key head, in which
the splits of the keys count themselves to find the last one; they are zero again after the call, so all layers share
one tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilewright.hardware.architectures import limits_of
from tilewright.kernels.attention import dispatch
from tilewright.kernels.attention.request import Request, TensorLike, strides_of
from tilewright.kernels.device import runs_triton
from tilewright.kernels.registration import define
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe


def _forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: torch.Tensor | None, more: int, else_all: bool,
    zeros: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    seen = torch.tensor([[k.shape[2]]], device=q.device) if prefix is None else prefix + more
    seen = torch.where(seen > 0, seen, k.shape[2]) if else_all else seen
    mask = torch.arange(k.shape[2], device=q.device) < seen
    out = F.scaled_dot_product_attention(q, k, v, mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    shape, strides = dispatch.strides_like(q, v.shape[3])
    # The kernels give zeros for a query that sees no key; PyTorch's choice may not.
    return q.new_empty_strided(shape, strides).copy_(torch.where(mask.any(-1, keepdim=True), out, 0))


def _fake(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: torch.Tensor | None, more: int, else_all: bool,
    zeros: torch.Tensor, scale: float,
) -> torch.Tensor:  # fmt: skip
    shape, strides = dispatch.strides_like(q, v.shape[3])
    return q.new_empty_strided(shape, strides)


def _recipe(
    call: RecipeBuilder, q: Operand, k: Operand, v: Operand, prefix: Operand | None, more: int, else_all: bool,
    zeros: Operand, scale: float,
) -> Recipe | None:  # fmt: skip
    """A launch of the Triton kernel that splits the keys; None if the kernel does not support the call."""
    from tilewright.kernels.attention.decode.triton import Prefix, plan, refuses
    from tilewright.kernels.attention.portable.launch import launch

    if not runs_triton(q) or any(0 in x.shape for x in (q, k, v)):
        return None
    request = request_of(q, k, v, scale)
    if refuses(request) is not None or any(x.strides[3] != 1 for x in (q, k, v)):
        return None
    shape, strides = dispatch.strides_like(q, v.shape[3])
    out, lse = call.empty(shape, q.dtype, strides), call.empty(q.shape[:3], torch.float32)
    seen = None if prefix is None else Prefix(prefix.strides[0], prefix.strides[2], more, else_all)
    made = plan(request, limits_of(q.device), strides, strides_of(None), seen)
    scratch = call.empty((made.scratch,), torch.float32) if made.scratch else None
    launch(call, made.launch, q, k, v, out, lse, scratch, zeros, None, None, prefix)
    return call.finish(out)


def takes(request: Request) -> bool:
    """Whether the operator computes a call, inference alone, if the call's mask is a prefix or none."""
    from tilewright.kernels.attention.decode.triton import refuses

    return refuses(request) is None and not (request.banded or request.softcap or request.alibi)


def request_of(q: TensorLike, k: TensorLike, v: TensorLike, scale: float) -> Request:
    """The call as plain data, without the limit of visible keys."""
    from tilewright.kernels.attention import registered

    return registered.request_of(q, k, v, None, None, None, None, scale, None, None, 0.0, 0.0, 0, 0, False)


attention_prefix = define("attention_prefix", _forward, _fake, recipe=_recipe)
