"""Softmax over rows in one pass over the columns, as a loop in Python: seven launches a column.

The running maximum and the sum rescaled to it (Milakov and Gimelshein, "Online normalizer calculation for
softmax", 2018) are what a fused kernel keeps in registers. As a loop they are the cautionary tale: 100×5000 is
35,005 launches, and a profiler that keeps every event of 200 calls fills the memory.

    tilewright profile examples/online_softmax.py:online --active 200
"""

from __future__ import annotations

import torch

from tilewright.records.case import Case, InputSpec


def online_softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax of `x` [N, M] over its rows."""
    largest = torch.full_like(x[:, 0], -torch.inf)
    total = torch.zeros_like(largest)
    for column in x.unbind(dim=1):
        larger = torch.maximum(largest, column)
        total = total * torch.exp(largest - larger) + torch.exp(column - larger)
        largest = larger
    return torch.exp(x - largest[:, None]) / total[:, None]


def case(*, N: int = 100, M: int = 5000, dtype: str = "fp32", name: str = "online") -> Case:
    return Case(name, lambda: online_softmax, [InputSpec.parse(f"{dtype}[N={N},M={M}]")], training=False)


online = case()
