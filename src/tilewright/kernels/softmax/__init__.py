"""Softmax and log-softmax, forward and backward."""

from __future__ import annotations

import torch

from tilewright.hardware.architectures import limits_of
from tilewright.kernels.arguments import expect_tensors, expect_whole_numbers
from tilewright.kernels.registration import define
from tilewright.kernels.row import rows_of
from tilewright.kernels.row_schedule import kernels_for
from tilewright.kernels.softmax import cuda
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.launch.gradient import Given, Grad, Gradient, Kept
from tilewright.records.recipe import Recipe


def softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """exp(xᵢ) / Σⱼ exp(xⱼ) along `dim`, as `torch.softmax`.

    Args:
        x: any shape, floating point, 1 to 2³¹ - 1 elements along `dim`. Rows at any distance from each
            other are read where they lie; where the elements of a row are not side by side (another
            `dim` than the last), x is copied first.
        dim: the dimension that sums to one.

    Returns:
        x's shape and dtype, contiguous before `dim` is put back in its place. NaN along `dim` where it
        holds NaN or +inf, or nothing but -inf.

    Raises:
        IndexError: no such dimension. RuntimeError: x is not floating point.

    fp32, bf16 and fp16 run our kernels on a GPU, with maximum and sum in fp32 (Milakov and Gimelshein,
    "Online normalizer calculation for softmax", 2018); any other dtype and the CPU run PyTorch's.
    The gradient is y · (dy - Σ y · dy), in one pass over y and dy.
    """
    return by_impl(x, dim, log=False)


def log_softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """xᵢ - max - log Σⱼ exp(xⱼ - max) along `dim`, as `torch.log_softmax`; the rest is as for `softmax`.

    The gradient is dy - exp(y) · Σ dy.
    """
    return by_impl(x, dim, log=True)


def by_impl(x: torch.Tensor, dim: int = -1, *, log: bool, impl: str = "auto") -> torch.Tensor:
    """Softmax or log-softmax by one of `row_schedule.IMPLS`, forward and backward; one that cannot take x raises."""
    if not isinstance(x, torch.Tensor):
        expect_tensors("log_softmax" if log else "softmax", x=x)
    if not isinstance(dim, int):
        expect_whole_numbers("log_softmax" if log else "softmax", dim=dim)
    if not x.is_floating_point():
        raise RuntimeError(f"softmax takes floating point, not {x.dtype}")
    last = dim in (-1, max(x.dim(), 1) - 1)
    result: torch.Tensor = _forward(x if last else x.movedim(dim, -1), log, impl)
    return result if last else result.movedim(-1, dim)


def _recipe(call: RecipeBuilder, x: Operand, log: bool, impl: str) -> Recipe | None:
    kernels = kernels_for(__name__, x, impl, cuda.longest("forward", limits_of(x.device)))
    if kernels is None:
        return None
    y = call.empty(x.shape, x.dtype)
    kernels.forward(call, rows_of(call, x), rows_of(call, y), log)
    return call.finish(y)


def _backward_recipe(call: RecipeBuilder, y: Operand, dy: Operand, log: bool, impl: str) -> Recipe | None:
    kernels = kernels_for(__name__, y, impl, cuda.longest("backward", limits_of(y.device)))
    if kernels is None:
        return None
    dx = call.empty(y.shape, y.dtype)
    kernels.backward(call, rows_of(call, y), rows_of(call, dy), rows_of(call, dx), log)
    return call.finish(dx)


def _by_torch(x: torch.Tensor, log: bool, impl: str) -> torch.Tensor:
    y = torch.log_softmax(x, -1) if log else torch.softmax(x, -1)
    return y.contiguous()


def _backward_by_torch(y: torch.Tensor, dy: torch.Tensor, log: bool, impl: str) -> torch.Tensor:
    aten = torch.ops.aten
    gradient = aten._log_softmax_backward_data if log else aten._softmax_backward_data
    dx: torch.Tensor = gradient(dy, y, -1, y.dtype)
    return dx.contiguous()


_backward = define(
    "softmax_backward",
    _backward_by_torch,
    lambda y, dy, log, impl: y.new_empty(y.shape),
    recipe=_backward_recipe,
)
_forward = define(
    "softmax",
    _by_torch,
    lambda x, log, impl: x.new_empty(x.shape),
    gradient=Gradient(_backward, (Kept(0), Grad(0), Given(1), Given(2)), (0, None, None)),
    recipe=_recipe,
)
__all__ = ["log_softmax", "softmax"]
