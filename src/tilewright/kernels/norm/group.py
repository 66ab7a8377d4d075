"""Group norm of channels-last tensors: one operator until a graph is partitioned, then sums and pointwise operators.

    y, mean, rstd = group_norm(x, G, w, b)   →   s = x.double(); Σ = sum(s); Σ² = sum(s · s)   over a channel's places
                                                 mean, rstd from those of the channels of a group
                                                 y = (x - mean) · (rstd · w) + b

PyTorch's group norm copies a channels-last operand on a GPU. Here the sums over pixels are column sums, since channels
are contiguous, and the rest is pointwise. Squares of 16-bit floats are exact in double, so that nothing is lost in the
difference of Σ² / n and mean². The gradient is that of Wu and He, arXiv:1803.08494:

    dx = g · rstd · w - (x - mean) · rstd³ · Σ_group(Σ g·(x - mean) · w) / n - rstd · Σ_group(Σ g · w) / n
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tilewright.graph.layouts import laid_channels_last, lies_channels_last
from tilewright.kernels.registration import define
from tilewright.launch.gradient import Gradient, Input, OutputGrad, Saved

Norm = tuple[Tensor, Tensor, Tensor]


def _forward(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Norm:
    """[N, C, …] of 16 bits, weight and bias [C] → y in its layout, mean and rstd [N, groups] in fp32."""
    parts = _by_groups(x, groups)
    count = parts[0, 0].numel()
    wide = parts.double()
    mean = _over_places(wide).sum(2) / count
    squares = _over_places(wide * wide).sum(2) / count
    rstd = ((squares - mean * mean).clamp_min(0) + eps).rsqrt().float()
    mean = mean.float()
    return normalised(x, weight, bias, mean, rstd), mean, rstd


def normalised(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, rstd: Tensor) -> Tensor:
    """The norm's result, from its moments [N, groups]."""
    groups = mean.shape[1]
    parts = _by_groups(x, groups)
    y = (parts - _for_parts(mean, parts)) * _scale(rstd, weight, parts)
    if bias is not None:
        y = y + bias.view(groups, -1, *[1] * (x.dim() - 2))
    return y.to(x.dtype).view(x.shape)


def _backward(g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor) -> Norm:
    """dx, dw, db; the last two [C], in the dtype of the weight."""
    groups = mean.shape[1]
    if lies_channels_last(x) and not lies_channels_last(g):
        g = laid_channels_last(g)
    g, x = _by_groups(g, groups), _by_groups(x, groups)
    count = x[0, 0].numel()
    level = _over_places(g.float())
    slope = _over_places(g * (x - _for_parts(mean, x)))
    dw, db = (slope * rstd.unsqueeze(-1)).sum(0), level.sum(0)
    if weight is not None:
        channels = weight.view(groups, -1)
        slope, level = slope * channels, level * channels
    tilt = _for_parts(rstd * rstd * rstd * slope.sum(2) / count, x)
    shift = _for_parts(rstd * level.sum(2) / count, x)
    # Compute x - mean again: a value shared by two kernels would be written to memory.
    dx = g * _scale(rstd, weight, x) - (x - _for_parts(mean, x)) * tilt - shift
    dtype = g.dtype if weight is None else weight.dtype
    shape = (x.shape[0], -1, *x.shape[3:])
    return dx.to(x.dtype).view(shape), dw.view(-1).to(dtype), db.view(-1).to(dtype)


def _by_groups(x: Tensor, groups: int) -> Tensor:
    """[N, C, …] → [N, groups, C / groups, …]."""
    samples, channels, *places = x.shape
    return x.view(samples, groups, channels // groups, *places)


def _over_places(parts: Tensor) -> Tensor:
    """Sums [N, groups, C / groups]."""
    return parts.sum(list(range(3, parts.dim())))


def _for_parts(of_groups: Tensor, parts: Tensor) -> Tensor:
    """[N, groups] → [N, groups, 1, …], which broadcasts against `parts`."""
    return of_groups.view(*of_groups.shape, *[1] * (parts.dim() - 2))


def _scale(rstd: Tensor, weight: Tensor | None, parts: Tensor) -> Tensor:
    scale = _for_parts(rstd, parts)
    return scale if weight is None else scale * weight.view(rstd.shape[1], -1, *[1] * (parts.dim() - 3))


def _fake(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Norm:
    mean, rstd = (x.new_empty(x.shape[0], groups, dtype=torch.float32) for _ in range(2))
    return torch.empty_like(x), mean, rstd


def _fake_backward(g: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor) -> Norm:
    like = x if weight is None else weight
    dw, db = (like.new_empty(x.shape[1]) for _ in range(2))
    return torch.empty_like(x), dw, db


_group_norm_backward = define("group_norm_backward", _backward, _fake_backward)
_GRADIENT = Gradient(
    _group_norm_backward, (OutputGrad(0), Input(0), Input(2), Saved(1), Saved(2)), (0, None, 1, 2, None)
)
define("group_norm", _forward, _fake, gradient=_GRADIENT)
FORMULAS: dict[Any, Callable[..., Norm]] = {
    torch.ops.tilewright.group_norm.default: _forward,
    torch.ops.tilewright.group_norm_backward.default: _backward,
}


def group_norm(x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Group norm of a 16-bit [N, C, …], with the same strides; `weight` and `bias` are [C]."""
    y: Tensor = torch.ops.tilewright.group_norm.default(x, groups, weight, bias, eps)[0]
    return y
