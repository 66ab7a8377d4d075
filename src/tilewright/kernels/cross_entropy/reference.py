"""The formula of cross entropy in plain PyTorch operators, in the dtype that comes in."""

from __future__ import annotations

import torch


def cross_entropy(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
) -> torch.Tensor:
    """The loss of logits [N, C] for the classes target [N]; arguments as of `tilewright.functional.cross_entropy`."""
    counted = target != ignore_index
    columns = target.where(counted, 0)[:, None]
    log_sum = torch.logsumexp(logits, -1)
    nll = log_sum - logits.gather(1, columns)[:, 0]
    uniform = log_sum - logits.mean(-1)
    loss = (1 - label_smoothing) * nll + z_loss * log_sum.square()
    # Not 0 · ∞ where nothing is smoothed and a logit is -inf.
    loss = loss + label_smoothing * uniform if label_smoothing else loss
    loss = loss.where(counted, torch.zeros_like(loss))
    if reduction == "none":
        return loss
    return loss.sum() / counted.sum() if reduction == "mean" else loss.sum()
