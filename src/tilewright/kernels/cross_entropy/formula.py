"""Cross entropy and its gradient by PyTorch's operators: for float64 and the CPU."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def forward(
    logits: torch.Tensor, target: torch.Tensor, ignored: int, smoothing: float, z_loss: float, reduction: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """The loss in `dtype`; each row's maximum and log Σ exp(x - maximum), [2, N]; the weight of one row, [].

    The last two are at least fp32. IndexError for a target that is no column.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    maximum = wide.amax(-1)
    log_sum = (wide - maximum[:, None]).exp().sum(-1).log()
    probabilities = wide - maximum[:, None] - log_sum[:, None]
    losses = F.nll_loss(probabilities, target, ignore_index=ignored, reduction="none")
    if smoothing:
        losses = (1 - smoothing) * losses - smoothing * probabilities.mean(-1)
    if z_loss:
        losses = losses + z_loss * (maximum + log_sum).square()
    losses = losses.where(target != ignored, losses.new_zeros(()))
    total, weight = reduced(losses, target, ignored, reduction)
    return total.to(dtype), torch.stack([maximum, log_sum]), weight


def reduced(
    losses: torch.Tensor, target: torch.Tensor, ignored: int, reduction: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """The losses [N] reduced, and the weight of one of them []."""
    if reduction == "none":
        return losses, losses.new_ones(())
    if reduction == "sum":
        return losses.sum(), losses.new_ones(())
    weight = (target != ignored).sum().to(losses.dtype).reciprocal()
    return losses.sum() * weight, weight


def backward(
    gradient: torch.Tensor, logits: torch.Tensor, target: torch.Tensor, statistics: torch.Tensor, weight: torch.Tensor,
    ignored: int, smoothing: float, z_loss: float,
) -> torch.Tensor:  # fmt: skip
    """The gradient of the logits [N, C] from that of the loss, [] or [N]."""
    maximum, log_sum = statistics[:, :, None]
    counted = (target != ignored)[:, None]
    scale = (gradient.to(weight.dtype) * weight).expand(target.shape)[:, None]
    share = (logits - maximum - log_sum).exp()
    columns = target[:, None].where(counted, 0)
    classes = logits.shape[1]
    # For a single class this is exactly 0.
    change: torch.Tensor = (share - smoothing / classes).scatter(
        1, columns, share.gather(1, columns) - (1 - smoothing * (classes - 1) / classes)
    )
    # Add this last: if one class has all of the probability, only this term is left.
    change += 2 * z_loss * (maximum + log_sum) * share
    # An ignored row is NaN where PyTorch's is: if it has NaN or +inf, or only -inf.
    return (change * scale).where(counted, log_sum - log_sum).to(logits.dtype)
