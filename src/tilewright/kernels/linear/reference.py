"""Linear layers with what follows them, in plain PyTorch operators of any dtype."""

from __future__ import annotations

import torch

from tilewright.kernels.activation import reference as activations


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    product = x @ weight.t()
    return product if bias is None else product + bias


def linear_gelu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, approximate: str = "none"
) -> torch.Tensor:
    """gelu(x · weightᵀ + bias)"""
    return activations.gelu(_linear(x, weight, bias), approximate)


def linear_dropout_add(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    p: float,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """(x · weightᵀ + bias) · mask / (1 - p) + residual; all is kept where there is no mask."""
    linear = _linear(x, weight, bias)
    return (linear if mask is None else linear * mask / (1.0 - p)) + residual
