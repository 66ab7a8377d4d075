"""A matrix product of fp32 by Hopper's 16-bit matrix instructions, as precise as one of fp32: `tilewright::product`."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.kernels.product import cuda
from tilewright.kernels.registration import define
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.records.recipe import Recipe


def _recipe(call: RecipeBuilder, left: Operand, right: Operand, bias: Operand | None) -> Recipe | None:
    return None if cuda.refuses(left, right) else call.finish(cuda.product(call, left, right, bias))


def by_library(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """left [(B,) M, K] · right [(B,) K, N] + bias [N] as PyTorch computes it."""
    if bias is None:
        return left @ right
    return torch.addmm(bias, left, right) if left.dim() == 2 else torch.baddbmm(bias, left, right)


def _fake(left: torch.Tensor, right: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return left.new_empty(*left.shape[:-1], right.shape[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:2])
    ctx.biased = inputs[2] is not None


def _backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    left, right = ctx.saved_tensors
    needs = ctx.needs_input_grad
    dleft = product(dy, right.mT, None) if needs[0] else None
    dright = product(left.mT, dy, None) if needs[1] else None
    return dleft, dright, dy.flatten(0, -2).sum(0) if ctx.biased and needs[2] else None


product = define("product", by_library, _fake, backward=_backward, save=_save, recipe=_recipe)
