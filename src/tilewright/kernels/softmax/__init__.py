"""Softmax and log-softmax, forward and backward: generated kernels, and CUDA C++ where rows are long."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.kernels.arguments import expect_tensors, expect_whole_numbers
from tilewright.kernels.device import runs_triton
from tilewright.kernels.generated import Formula
from tilewright.kernels.registration import define
from tilewright.kernels.row import rows_of, with_rows
from tilewright.kernels.softmax import cuda
from tilewright.launch.builder import Operand, RecipeBuilder
from tilewright.launch.gradient import Gradient, Input, OutputGrad, Saved
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
    return _along(x, dim, False)


def log_softmax(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """xᵢ - max - log Σⱼ exp(xⱼ - max) along `dim`, as `torch.log_softmax`; the rest is as for `softmax`.

    The gradient is dy - exp(y) · Σ dy.
    """
    return _along(x, dim, True)


def _along(x: torch.Tensor, dim: int, log: bool) -> torch.Tensor:
    if not isinstance(x, torch.Tensor):
        expect_tensors("log_softmax" if log else "softmax", x=x)
    if not isinstance(dim, int):
        expect_whole_numbers("log_softmax" if log else "softmax", dim=dim)
    if not x.is_floating_point():
        raise RuntimeError(f"softmax takes floating point, not {x.dtype}")
    last = dim in (-1, max(x.dim(), 1) - 1)
    result: torch.Tensor = _forward(x if last else x.movedim(dim, -1), log)
    return result if last else result.movedim(-1, dim)


def _recipe(call: RecipeBuilder, x: Operand, log: bool) -> Recipe | None:
    if cuda.takes("forward", x):
        y = call.empty(x.shape, x.dtype)
        cuda.forward(call, rows_of(call, x), rows_of(call, y), log)
        return call.finish(y)
    aten = torch.ops.aten
    return _generated(call, (aten._log_softmax if log else aten._softmax).default, (x,), -1, False)


def _backward_recipe(call: RecipeBuilder, y: Operand, dy: Operand, log: bool) -> Recipe | None:
    if cuda.takes("backward", y) and dy.dtype == y.dtype:
        dx = call.empty(y.shape, y.dtype)
        cuda.backward(call, rows_of(call, y), rows_of(call, dy), rows_of(call, dx), log)
        return call.finish(dx)
    return _generated(call, _gradient(log), (dy, y), -1, y.dtype)


def _generated(call: RecipeBuilder, operator: Any, tensors: tuple[Operand, ...], *options: Any) -> Recipe | None:
    if not all(x.dim() and x.numel() and runs_triton(x) and x.dtype == tensors[0].dtype for x in tensors):
        return None
    dense = [with_rows(call, x) for x in tensors]
    formula = Formula(dense)
    result = formula.call(operator, *dense, *options, fake=lambda x, *_: x.new_empty(x.shape))
    return call.finish(*formula.launch(call, "softmax", [result]))


def _by_torch(x: torch.Tensor, log: bool) -> torch.Tensor:
    y = torch.log_softmax(x, -1) if log else torch.softmax(x, -1)
    return y.contiguous()


def _gradient(log: bool) -> Any:
    aten = torch.ops.aten
    return (aten._log_softmax_backward_data if log else aten._softmax_backward_data).default


def _backward_by_torch(y: torch.Tensor, dy: torch.Tensor, log: bool) -> torch.Tensor:
    dx: torch.Tensor = _gradient(log)(dy, y, -1, y.dtype)
    return dx.contiguous()


_backward = define(
    "softmax_backward", _backward_by_torch, lambda y, dy, log: y.new_empty(y.shape), recipe=_backward_recipe
)
_forward = define(
    "softmax",
    _by_torch,
    lambda x, log: x.new_empty(x.shape),
    gradient=Gradient(_backward, (Saved(0), OutputGrad(0), Input(1)), (0, None)),
    recipe=_recipe,
)
__all__ = ["log_softmax", "softmax"]
