"""Channels-last tensors [N, C, …], whose channels are contiguous: sequences, images and volumes."""

from __future__ import annotations

import torch
from torch import Tensor

FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""PyTorch's memory format by the number of dimensions. It has none for sequences [N, C, L]."""


def lies_channels_last(x: Tensor) -> bool:
    """Whether `x` is channels-last, without gaps."""
    if x.dim() == 3:
        return x.transpose(1, 2).is_contiguous()
    return x.dim() in FORMATS and x.is_contiguous(memory_format=FORMATS[x.dim()])


def laid_channels_last(x: Tensor) -> Tensor:
    """A channels-last copy, with the strides that `clone` gives it."""
    if x.dim() == 3:
        return x.unsqueeze(2).clone(memory_format=torch.channels_last).squeeze(2)
    return x.clone(memory_format=FORMATS[x.dim()])
