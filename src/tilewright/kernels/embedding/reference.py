"""The embedding in plain PyTorch operators."""

from __future__ import annotations

import torch


def embedding(indices: torch.Tensor, weight: torch.Tensor, padding_idx: int | None = None) -> torch.Tensor:
    """weight[indices]; the row `padding_idx` gets no gradient."""
    rows = weight[indices]
    if padding_idx is None:
        return rows
    padding = (indices == padding_idx % weight.shape[0])[..., None]
    return torch.where(padding, rows.detach(), rows)
