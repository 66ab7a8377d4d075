"""Launches of the Triton kernels, on the grid of PyTorch's own draw."""

from __future__ import annotations

import torch
import triton

from tilewright.kernels.device import current
from tilewright.kernels.dropout_add import triton as kernels
from tilewright.kernels.dropout_add.generator import Geometry, scale, threshold
from tilewright.kernels.launches import launch

STEPS = 2
"""Steps of a program; it computes what they share once."""
WARPS = 4


def forward(
    x: torch.Tensor, residual: torch.Tensor, p: float, kind: str, geometry: Geometry, state: torch.Tensor,
    start: tuple[int, int] | None,
) -> torch.Tensor:  # fmt: skip
    """dropout(act(x)) + residual, all contiguous.

    `start`: seed and offset, which are stored to `state` (int64[2] on the device); None if `state` has them.
    """
    out = torch.empty_like(x)
    seed, offset = start or (0, 0)
    draws = 0.0 < p < 1.0
    with current(x):
        if start and draws:
            launch(kernels.remember, (1,), state, seed, offset, num_warps=1)
        launch(
            kernels.forward, (geometry.columns, triton.cdiv(geometry.steps, STEPS)),
            x, residual, out, state, x.numel(), geometry.blocks, seed, offset, threshold(p), scale(p),
            KIND=kind, PRECISE=x.dtype == torch.float32, VECTOR=geometry.vector, STEPS=STEPS,
            DRAWS=draws, CAPTURED=start is None, num_warps=WARPS,
        )  # fmt: skip
    return out


def backward(
    dout: torch.Tensor, x: torch.Tensor | None, p: float, kind: str, geometry: Geometry, state: torch.Tensor
) -> torch.Tensor:
    """dx, from contiguous tensors; x is None where the activation is "none"."""
    dx = torch.empty_like(dout)
    with current(dout):
        launch(
            kernels.backward, (geometry.columns, triton.cdiv(geometry.steps, STEPS)),
            dout, dout if x is None else x, dx, state, dout.numel(), geometry.blocks, threshold(p), scale(p),
            KIND=kind, PRECISE=dout.dtype == torch.float32, VECTOR=geometry.vector, STEPS=STEPS,
            DRAWS=0.0 < p < 1.0, num_warps=WARPS,
        )  # fmt: skip
    return dx
