"""Functions of scores and of places that the tests give to `flex_attention`."""

import torch
from torch import Tensor

H, K, D = 4, 2, 16
"""Heads of queries and of keys, and their size."""
SLOPES = torch.linspace(0.1, 0.4, H)


def alibi(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return score + SLOPES[h] * (j - i)


def of_heads(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
    return (h == 0) | (i >= j)
