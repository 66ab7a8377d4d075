"""Inputs and options of linear and cross entropy that its tests share."""

from dataclasses import replace

import torch
import torch.nn.functional as F

from tilewright.bench.catalogue import suite
from tilewright.kernels.linear_cross_entropy import linear_cross_entropy
from tilewright.records.suite import Variant

Options = tuple[int, float, float, str]

OPTIONS: list[Options] = [
    (-100, 0.0, 0.0, "mean"),
    (0, 0.0, 0.0, "mean"),
    (-100, 0.1, 0.0, "mean"),
    (-100, 0.0, 1e-2, "sum"),
    (0, 1.0, 1e-3, "mean"),
]
"""`ignore_index`, `label_smoothing`, `z_loss`, `reduction`."""


def of_all_logits(
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


SUITE = replace(
    suite("linear_cross_entropy"), reference=of_all_logits, variants=(Variant("eager", "torch", of_all_logits),)
)


def by_position(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int, smoothing: float, z: float, how: str
) -> torch.Tensor:
    """Our operator, called as the suite's reference is."""
    return linear_cross_entropy(
        x, weight, target, ignore_index=ignore_index, label_smoothing=smoothing, z_loss=z, reduction=how
    )


def inputs(
    tokens: int, hidden: int, vocabulary: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight and target; some targets are 0, for the options that ignore it, and the first is not."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, hidden, generator=generator).to(device, dtype).requires_grad_()
    weight = torch.randn(vocabulary, hidden, generator=generator).div(hidden**0.5).to(device, dtype).requires_grad_()
    target = torch.randint(0, vocabulary, (tokens,), generator=generator)
    target[1::3] = 0
    target[:1] = vocabulary - 1
    return x, weight, target.to(device)


def error_of_a_sure_row() -> torch.Tensor:
    """The fp32 gradient's error relative to the z-loss, which alone remains of it if a probability is nearly one."""
    x, weight, target = torch.tensor([[30.0, 1.0]]), torch.tensor([[1.0, 0.0], [0.0, 1.0]]), torch.tensor([0])
    found = []
    for dtype in (torch.float32, torch.float64):
        rows, columns = (tensor.to(dtype).requires_grad_() for tensor in (x, weight))
        loss = linear_cross_entropy(rows, columns, target, z_loss=1e-3)
        found.append(torch.autograd.grad(loss, rows)[0].double())
    return (found[0] - found[1]).norm() / found[1].norm()
