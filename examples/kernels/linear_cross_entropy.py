"""Linear and cross entropy in chunks as a PyTorch user would write them: gradients while a chunk's logits exist."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

ROWS = 2048
"""Rows of a chunk: 512 MiB of logits in bf16 at 131072 columns."""


def _chunk_loss(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, tokens: int) -> torch.Tensor:
    return F.cross_entropy(F.linear(x, weight).float(), target, reduction="sum") / tokens


@functools.cache
def _chunk() -> Any:
    return torch.compile(torch.func.grad_and_value(_chunk_loss, argnums=(0, 1)), dynamic=False)


class InChunks(torch.autograd.Function):
    """The mean over all tokens; gradients are computed in forward, chunk by chunk, by compiled autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        losses, dx, dweight = [], torch.empty_like(x), torch.zeros_like(weight)
        for start in range(0, len(x), ROWS):
            part = slice(start, start + ROWS)
            (dx[part], change), loss = _chunk()(x[part], weight, target[part], len(x))
            dweight += change
            losses.append(loss)
        ctx.save_for_backward(dx, dweight)
        return torch.stack(losses).sum().to(x.dtype)

    @staticmethod
    def backward(ctx: Any, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        dx, dweight = ctx.saved_tensors
        return dx * upstream, dweight * upstream, None


def in_chunks(x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = InChunks.apply(x, weight, target)  # type: ignore[no-untyped-call]
    return loss
