"""The weighted sum of rows in plain PyTorch operators."""

from __future__ import annotations

import torch


def weighted_sum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """y[n] = Σ_d x[n, d]·w[d]"""
    return (x * w).sum(-1)
