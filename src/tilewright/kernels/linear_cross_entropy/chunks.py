"""Computes the loss and its gradients one chunk of tokens at a time, so that only a chunk's logits exist."""

from __future__ import annotations

import torch

from tilewright.kernels import cross_entropy
from tilewright.kernels.by_recipe import performed
from tilewright.kernels.cross_entropy import formula
from tilewright.kernels.row_schedule import kernels_for
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.operators.own.linear_cross_entropy import chunk_rows
from tilewright.records.recipe import Recipe


def by_chunks(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor, ignore_index: int, label_smoothing: float,
    z_loss: float, mean: bool, needs: tuple[bool, bool],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Loss [] in x's dtype, gradients of x and of weight (empty where not needed), and the factor that backward
    multiplies into the gradients, [] in fp32 (fp64 for fp64).

    Each chunk takes three products: the logits; then, from their gradient in the same memory, the gradient of x
    (each row whole) and that of weight, summed in its own dtype between chunks and in fp32 within one.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    counted = (target != ignore_index).sum().to(wide) if mean else torch.ones((), dtype=wide, device=x.device)
    applied, remaining = _split_scale(counted, x.dtype)
    total = torch.zeros((), dtype=wide, device=x.device)
    dx = torch.empty_like(x) if needs[0] else x.new_empty(0)
    # Without tokens no chunk writes the gradient, so it must be zeros.
    dweight = torch.zeros_like(weight) if needs[1] and len(x) == 0 else torch.empty_like(weight) if needs[1] else None
    rows = chunk_rows(len(x), len(weight), x.element_size())
    memory = x.new_empty(min(rows, len(x)), len(weight))
    for start in range(0, len(x), rows):
        part = slice(start, start + rows)
        logits = torch.mm(x[part], weight.t(), out=memory[: len(x[part])])
        total += _loss_and_gradient(logits, target[part], applied, ignore_index, label_smoothing, z_loss, any(needs))
        if needs[0]:
            torch.mm(logits, weight, out=dx[part])
        if dweight is not None and start == 0:
            torch.mm(logits.t(), x[part], out=dweight)
        elif dweight is not None:
            dweight.addmm_(logits.t(), x[part])
    loss = (total / counted).to(x.dtype)
    return loss, dx, weight.new_empty(0) if dweight is None else dweight, remaining


def _split_scale(counted: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """1 / counted in two factors: one applied before the gradients of the logits are rounded, one in backward.

    In fp16 the gradients of a mean over thousands of tokens underflow, and sums over unscaled ones overflow, so each
    factor is the square root; in other dtypes the first is all. With every token ignored all gradients are zero.
    """
    inverse = 1.0 / counted.clamp(min=1)
    if dtype == torch.float16:
        return inverse.sqrt(), inverse.sqrt()
    return inverse, torch.ones_like(inverse)


def _loss_and_gradient(
    logits: torch.Tensor, target: torch.Tensor, applied: torch.Tensor, ignored: int, smoothing: float, z_loss: float,
    gradient: bool,
) -> torch.Tensor:  # fmt: skip
    """The sum of the rows' losses in the dtype of `applied`. With `gradient`, the logits' gradient times `applied`
    overwrites the logits."""
    options = ignored, smoothing, z_loss
    found = performed("tilewright::linear_cross_entropy", in_place, logits, target, applied, *options, gradient)
    if found is not None:
        return found[0]
    loss, statistics, weight = formula.forward(logits, target, *options, "sum", applied.dtype)
    if gradient:
        logits.copy_(formula.backward(applied, logits, target, statistics, weight, *options))
    return loss


def in_place(
    call: RecipeBuilder, logits: Operand, target: Operand, applied: Operand, ignored: int, smoothing: float,
    z_loss: float, gradient: bool,
) -> Recipe | None:  # fmt: skip
    """`_loss_and_gradient` by the kernels of cross entropy, whose backward can overwrite the logits."""
    kernels = kernels_for(cross_entropy.__name__, logits, "auto")
    if kernels is None:
        return None
    options = ignored, smoothing, z_loss
    loss, statistics, weight = kernels.forward(call, logits, target, *options, "sum", torch.float32)
    if gradient:
        kernels.backward(call, applied, logits, target, statistics, weight, logits, *options)
    return call.finish(loss)


def scale(gradient: torch.Tensor, factor: torch.Tensor) -> None:
    """`gradient *= factor` for a contiguous tensor and a scalar on its device."""
    gradient.mul_(factor.to(gradient.dtype))
