"""The formulas of softmax and log-softmax, each along the last dimension, in the dtype that comes in."""

from __future__ import annotations

import torch


def softmax(x: torch.Tensor) -> torch.Tensor:
    """exp(xᵢ - max x) / Σⱼ exp(xⱼ - max x), of x: [..., M]."""
    exponentials = torch.exp(x - _maximum(x))
    return exponentials / exponentials.sum(-1, keepdim=True)


def log_softmax(x: torch.Tensor) -> torch.Tensor:
    """xᵢ - max x - log Σⱼ exp(xⱼ - max x), of x: [..., M]."""
    below = x - _maximum(x)
    return below - below.exp().sum(-1, keepdim=True).log()


def _maximum(x: torch.Tensor) -> torch.Tensor:
    """The maximum of each row; of an empty row, 0."""
    return x.amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(())
