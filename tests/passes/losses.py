"""Models that end in cross entropy, as language models write it."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES = 101


class Head(nn.Module):
    """The last product of a language model and its loss."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.project = nn.Linear(16, CLASSES, dtype=dtype)
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return self.loss(self.project(x), target)


def padded(logits: Tensor, target: Tensor) -> Tensor:
    """As `transformers` does from 4.45 on: labels are padded and shifted."""
    shifted = F.pad(target, (0, 1), value=-100)[..., 1:].contiguous()
    logits = logits.float()
    return F.cross_entropy(logits.view(-1, CLASSES), shifted.view(-1), ignore_index=-100, reduction="sum") / 7


def shifted(logits: Tensor, target: Tensor) -> Tensor:
    """As `transformers` did before: logits are shifted."""
    rows = logits.float()[..., :-1, :].contiguous()
    return F.cross_entropy(rows.view(-1, CLASSES), target[..., 1:].contiguous().view(-1))


def ignoring(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=3)


def by_row(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none")


def by_hand(logits: Tensor, target: Tensor) -> Tensor:
    return F.nll_loss(logits.float().flatten(0, 1).log_softmax(-1), target.flatten())


LOSSES = [padded, shifted, ignoring, by_row, by_hand]


def inputs(dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two sequences of nine tokens; some targets are ignored."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randint(0, CLASSES, (2, 9), generator=generator)
    target[0, 4] = 3
    return torch.randn(2, 9, 16, generator=generator).to(dtype).requires_grad_(), target
