"""The norms and their gradients in PyTorch operators: what runs on a CPU, and in float64 anywhere.

16-bit matrices are computed in fp32 and rounded once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def _rows(x: Tensor) -> Tensor:
    """x [..., columns] as a matrix, in the dtype of sums."""
    matrix = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    return matrix if x.dtype == torch.float64 else matrix.float()


def _shaped(matrix: Tensor, like: Tensor) -> Tensor:
    # Not a view: autograd forbids writing to a view that an operator returns.
    shaped: Tensor = torch.ops.aten._unsafe_view.default(matrix.to(like.dtype), like.shape)
    return shaped


def forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, centered: bool
) -> tuple[Tensor, ...]:
    """y, x + residual (if there is one), mean (empty unless `centered`) and rstd, of each row of x [..., columns]."""
    total = None if residual is None else (x + residual).contiguous()
    values = _rows(x if total is None else total)
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
    return _shaped(y, x), *(() if total is None else (total,)), mean, rstd


def backward(
    dy: Tensor,
    x: Tensor,
    dsum: Tensor | None,
    weight: Tensor | None,
    has_bias: bool,
    mean: Tensor,
    rstd: Tensor,
    centered: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx (plus `dsum`), dweight and dbias; empty where there is no weight, no bias."""
    incoming = _rows(dy)
    normal = (_rows(x) - mean[:, None] if centered else _rows(x)) * rstd[:, None]
    gradient = incoming if weight is None else incoming * weight
    off = gradient - normal * (gradient * normal).mean(1, keepdim=True)
    off = off - gradient.mean(1, keepdim=True) if centered else off
    dx = off * rstd[:, None] if dsum is None else off * rstd[:, None] + _rows(dsum)
    dtype = x.dtype if weight is None else weight.dtype
    vectors = (incoming * normal if weight is not None else None), (incoming if has_bias else None)
    d_weight, d_bias = (x.new_empty(0, dtype=dtype) if v is None else v.sum(0).to(dtype) for v in vectors)
    return _shaped(dx, x), d_weight, d_bias
