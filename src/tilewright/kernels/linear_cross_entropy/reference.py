"""Cross entropy of a linear layer's outputs, in plain PyTorch operators of any dtype."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def linear_cross_entropy(
    x: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """`cross_entropy(x · weightᵀ, target) + z_loss · mean(logsumexp²)`, all logits at once.

    `x` is [tokens, hidden], `weight` [vocabulary, hidden], `target` [tokens] int64.
    """
    logits = x @ weight.t()
    loss = F.cross_entropy(
        logits, target, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction=reduction
    )
    if z_loss == 0.0:
        return loss
    counted = target != ignore_index
    squares = torch.logsumexp(logits, -1).square().where(counted, 0.0).sum()
    return loss + z_loss * (squares / counted.sum() if reduction == "mean" else squares)
