"""dropout(act(x)) + residual in plain PyTorch operators, for a given mask."""

from __future__ import annotations

import torch

from tilewright.kernels.activation import reference as activations


def activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """x, or the formula of its activation."""
    if kind == "none":
        return x
    if kind == "silu":
        return activations.silu(x)
    return activations.gelu(x, "tanh" if kind == "gelu_tanh" else "none")


def dropout_add(x: torch.Tensor, residual: torch.Tensor, p: float, kind: str, mask: torch.Tensor) -> torch.Tensor:
    """act(x)·mask / (1 - p) + residual; `mask` is bool, of x's shape."""
    return activation(x, kind) * mask / (1.0 - p) + residual
