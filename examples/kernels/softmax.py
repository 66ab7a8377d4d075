"""Softmax without fusion: what one kernel saves.

tilewright bench softmax --sweep reference
tilewright bench softmax --impl eager,online-loop,torch --shapes 100x5000
"""

from __future__ import annotations

import torch


def steps(x: torch.Tensor) -> torch.Tensor:
    """One PyTorch operator a step over x [N, M]: five kernels, 5NM + 2N values read and 3NM + 2N written.

    `max` also finds the indices of the maxima: N more values, written and never used.
    """
    maximum = x.max(-1, keepdim=True)[0]
    below = x - maximum
    numerator = torch.exp(below)
    denominator = numerator.sum(-1, keepdim=True)
    return numerator / denominator


def online_loop(x: torch.Tensor) -> torch.Tensor:
    """The online algorithm (Milakov and Gimelshein 2018) column by column in Python, over x [N, M].

    It reads x once and needs 7M + 5 kernels for that: on a GPU only their launches show. The sum is kept in float64,
    since thousands of terms are added one after another. No gradient.
    """
    maximum = torch.full_like(x[:, 0], -torch.inf)
    total = torch.zeros_like(maximum, dtype=torch.float64)
    for column in x.unbind(1):
        above = torch.maximum(maximum, column)
        total = total * torch.exp(maximum - above) + torch.exp(column - above)
        maximum = above
    return torch.exp(x - maximum[:, None]).div_(total[:, None])
