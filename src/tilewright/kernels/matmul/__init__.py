"""The product of two matrices, tiled through shared memory: the textbook case."""

from __future__ import annotations

from typing import Any

import torch

from tilewright.kernels.device import autocast, runs_triton
from tilewright.kernels.registration import define


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a · b by a tiled Triton kernel that is kept readable; `torch.mm` is faster.

    Args:
        a: [M, K], b: [K, N], one floating-point dtype and device. Rows of any stride; other layouts are
            made contiguous. fp64 and CPU tensors go to PyTorch. Under autocast they are taken in its dtype.

    Returns:
        [M, N] in their dtype; sums in fp32.

    Raises:
        ValueError: shapes, dtypes or devices that do not fit.
    """
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        raise ValueError(f"matmul takes a [M, K] and b [K, N], not {list(a.shape)} and {list(b.shape)}")
    if not a.dtype.is_floating_point or (a.dtype, a.device) != (b.dtype, b.device):
        raise ValueError(
            f"matmul takes one floating-point dtype and device, not {a.dtype} {a.device}, {b.dtype} {b.device}"
        )
    product: torch.Tensor = _matmul(autocast(a), autocast(b))
    return product


def _forward(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if not runs_triton(a) or a.numel() == 0 or b.numel() == 0:
        return torch.mm(a, b)
    from tilewright.kernels.matmul import triton as kernels

    return kernels.matmul(*(matrix if matrix.stride(1) == 1 else matrix.contiguous() for matrix in (a, b)))


def _save(ctx: Any, inputs: tuple[torch.Tensor, torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    a, b = ctx.saved_tensors
    needs = ctx.needs_input_grad
    return _matmul(gradient, b.t()) if needs[0] else None, _matmul(a.t(), gradient) if needs[1] else None


_matmul = define(
    "matmul(Tensor a, Tensor b) -> Tensor",
    _forward,
    lambda a, b: a.new_empty(a.shape[0], b.shape[1]),
    backward=_backward,
    save=_save,
)
