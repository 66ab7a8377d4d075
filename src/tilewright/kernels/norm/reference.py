"""The formulas in PyTorch's own operators, one after another; in float64 they are the truth.

Layer normalisation: Ba, Kiros and Hinton, 2016 (arXiv:1607.06450). RMS normalisation: Zhang and Sennrich,
2019 (arXiv:1910.07467).
"""

from __future__ import annotations

import torch
from torch import Tensor

FLOAT_EPSILON = torch.finfo(torch.float32).eps
"""The epsilon of `rms_norm` where none is given, for every dtype up to fp32."""


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5) -> Tensor:
    """(x - mean) / √(variance + eps) · weight + bias over the last dimension, the variance's mean over all of it."""
    centred = x - x.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def rms_norm(x: Tensor, weight: Tensor | None, eps: float = FLOAT_EPSILON) -> Tensor:
    """x / √(mean of x² + eps) · weight over the last dimension."""
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return y if weight is None else y * weight


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float = 1e-5
) -> tuple[Tensor, Tensor]:
    """`layer_norm` of x + residual, and x + residual."""
    total = x + residual
    return layer_norm(total, weight, bias, eps), total


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float = FLOAT_EPSILON
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of x + residual, and x + residual."""
    total = x + residual
    return rms_norm(total, weight, eps), total
