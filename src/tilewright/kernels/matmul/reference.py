"""The product of two matrices, by the definition."""

from __future__ import annotations

import torch


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """c[i, j] = Σ a[i, k] b[k, j], in the dtype that comes in."""
    return torch.einsum("ik,kj->ij", a, b)
