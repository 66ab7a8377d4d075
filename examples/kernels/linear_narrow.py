"""A linear layer with an epilogue whose matrix instructions have 128 columns in place of 256.

    tilewright bench linear_gelu
    tilewright bench linear_dropout_add

An instruction half as wide needs half the registers for its sums, so seven warps are left for the epilogue in place
of three; but x is read from shared memory twice, which slows the product itself: on an H200 it takes 1.03 to 1.17
times as long at the suites' sizes.
"""

from __future__ import annotations

import torch

from tilewright.kernels.linear import cuda, dropout_add_fused, gelu_fused

NARROW = cuda.ProductBuild(columns=128, epilogue_warps=7, ring_rows=4, mask_bytes=0)


def linear_gelu(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, approximate: str = "none"
) -> torch.Tensor:
    """gelu(x · weightᵀ + bias) for what `cuda.refuses` does not refuse. No gradient."""
    return gelu_fused(x, weight, bias, approximate, shape=NARROW)[0]


def linear_dropout_add(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, residual: torch.Tensor, p: float
) -> torch.Tensor:
    """dropout(x · weightᵀ + bias, p) + residual, likewise."""
    return dropout_add_fused(x, weight, bias, residual, p, shape=NARROW)[0]
