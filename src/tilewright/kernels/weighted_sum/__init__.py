"""The weighted sum of rows, y = x·w, forward and backward: the textbook case of a tiled 2-D kernel.

    y[n]  = Σ_d x[n, d]·w[d]        one read of x
    dx    = dy ⊗ w                  one write of dx
    dw[d] = Σ_n dy[n]·x[n, d]       one read of x, in the same pass

On a CUDA device kernels are generated for fp32, bf16 and fp16, with sums in fp32; fp64, and every dtype on a CPU, is
computed by PyTorch's operators.
"""

from __future__ import annotations

from typing import Any

import torch

from tilewright.kernels.arguments import expect_tensors
from tilewright.kernels.device import NARROW
from tilewright.kernels.registration import define


def weighted_sum(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Σ_d x[..., d]·w[d] for x[..., D] and w[D] of one floating dtype: shape [...], that dtype.

    Rows of x may have any distance if their elements are adjacent; other layouts are copied. Raises ValueError if
    shapes, dtypes or devices do not fit, TypeError if the dtype is not floating.

    >>> weighted_sum(torch.arange(6.0).reshape(2, 3), torch.tensor([1.0, 10.0, 100.0]))
    tensor([210., 543.])
    """
    if not (isinstance(x, torch.Tensor) and isinstance(w, torch.Tensor)):
        expect_tensors("weighted_sum", x=x, w=w)
    if not x.is_floating_point():
        raise TypeError(f"weighted_sum takes floating-point tensors, not {x.dtype}")
    if x.dim() == 0 or w.shape != x.shape[-1:] or (x.dtype, x.device) != (w.dtype, w.device):
        raise ValueError(
            f"weighted_sum takes x[..., D] and w[D] of one dtype and device, not {tuple(x.shape)} {x.dtype} on "
            f"{x.device} and {tuple(w.shape)} {w.dtype} on {w.device}"
        )
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return _weighted_sum(rows, w).reshape(x.shape[:-1])  # type: ignore[no-any-return]


def _forward(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    wide = torch.float32 if x.dtype in NARROW else x.dtype
    return torch.mv(x.to(wide), w.to(wide)).to(x.dtype)


def _backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, want_dx: bool, want_dw: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.float32 if x.dtype in NARROW else x.dtype
    dx = dy[:, None] * w if want_dx else x.new_empty(0, 0)
    dw = torch.mv(x.mT.to(wide), dy.to(wide)).to(w.dtype) if want_dw else w.new_empty(0)
    return dx, dw


def _backward_fake(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, want_dx: bool, want_dw: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape if want_dx else (0, 0)), w.new_empty(w.shape if want_dw else (0,))


def _gradients(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    want_dx, want_dw = ctx.needs_input_grad
    dx, dw = _weighted_sum_backward(dy, *ctx.saved_tensors, want_dx, want_dw)
    return dx if want_dx else None, dw if want_dw else None


_weighted_sum_backward = define("weighted_sum_backward", _backward, _backward_fake)
_weighted_sum = define(
    "weighted_sum",
    _forward,
    lambda x, w: x.new_empty(x.shape[:1]),
    backward=_gradients,
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
