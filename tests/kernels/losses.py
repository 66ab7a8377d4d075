"""Helpers of the cross-entropy tests on CPU, interpreter and GPU: options, targets, and a suite for them."""

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from tests.contract import broken
from tilewright.bench.suites.cross_entropy import SUITES
from tilewright.kernels.cross_entropy import by_impl
from tilewright.records.measurement import Verified
from tilewright.records.suite import Variant

OPTIONS: dict[str, dict[str, Any]] = {
    "mean": {},
    "sum": {"reduction": "sum"},
    "none": {"reduction": "none"},
    "smoothed": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "all at once": {"label_smoothing": 0.3, "z_loss": 1e-3, "reduction": "sum", "ignore_index": 0},
}


def targets(logits: torch.Tensor, ignored: int = -100) -> torch.Tensor:
    """A class for each row [N], every third one ignored (but the first, so that something is counted)."""
    rows, columns = logits.shape
    drawn = torch.randint(columns, (rows,), generator=torch.Generator().manual_seed(1))
    drawn[2::3] = ignored
    return drawn.to(logits.device)


def _torch(
    logits: torch.Tensor, target: torch.Tensor, *, z_loss: float = 0.0, reduction: str = "mean", **options: Any
) -> torch.Tensor:
    """PyTorch's own, with the z-loss added up as it adds its losses up."""
    loss = F.cross_entropy(logits, target, reduction=reduction, **options)
    if not z_loss:
        return loss
    counted = target != options.get("ignore_index", -100)
    extra = z_loss * torch.logsumexp(logits, -1).square() * counted
    if reduction == "none":
        return loss + extra
    return loss + (extra.sum() / counted.sum() if reduction == "mean" else extra.sum())


def wrong_losses(logits: torch.Tensor, options: dict[str, Any], impl: str) -> list[Verified]:
    """Which of the loss and its gradient, by one impl, break the contract with PyTorch's."""
    suite = replace(
        SUITES["cross_entropy"],
        reference=functools.partial(_torch, **options),
        variants=(Variant("torch", "torch", functools.partial(_torch, **options)),),
    )
    target = targets(logits, options.get("ignore_index", -100))
    return broken(suite, [logits.requires_grad_(), target], functools.partial(by_impl, impl=impl, **options))
