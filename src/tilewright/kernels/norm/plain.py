"""The norms and their gradients in PyTorch operators: what runs on a CPU, and in float64 anywhere.

16-bit matrices are computed in fp32 and rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _wide(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, Tensor | None, Tensor, Tensor]:
    """y, x + residual (None without one), mean (empty unless `centered`) and rstd, of matrices [rows, columns]."""
    total = None if residual is None else x + residual
    values = _wide(x if total is None else total)
    mean = values.new_empty(0)
    if centered:
        mean = values.mean(1)
        # Add the mean's rounding error: the mean of a row of one value is that value then.
        mean += (values - mean[:, None]).mean(1)
        values = values - mean[:, None]
    rstd = torch.rsqrt(values.square().mean(1) + eps)
    y = values * rstd[:, None]
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype), total, mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    dsum: Tensor | None,
    weight: Tensor | None,
    has_bias: bool,
    mean: Tensor,
    rstd: Tensor,
    centered: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """dx (plus `dsum`), dweight and dbias, of matrices [rows, columns]."""
    incoming = _wide(dy)
    normal = (_wide(x) - mean[:, None] if centered else _wide(x)) * rstd[:, None]
    gradient = incoming if weight is None else incoming * weight
    off = gradient - normal * (gradient * normal).mean(1, keepdim=True)
    off = off - gradient.mean(1, keepdim=True) if centered else off
    dx = off * rstd[:, None] if dsum is None else off * rstd[:, None] + dsum
    dtype = x.dtype if weight is None else weight.dtype
    d_weight = None if weight is None else (incoming * normal).sum(0).to(dtype)
    return dx.to(x.dtype), d_weight, incoming.sum(0).to(dtype) if has_bias else None
