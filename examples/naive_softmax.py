"""Softmax over rows, written as five steps: what unfused pointwise operators and reductions cost.

Each step is a kernel that reads its operands from memory and writes its result back: together they
read 5·N·M + 2·N values and write 3·N·M + 2·N, where one fused kernel reads N·M and writes N·M. The
indices of `max` are N more values that are written and never used.

    tilewright explain examples/naive_softmax.py:softmax
"""

from __future__ import annotations

import torch

from tilewright.records.case import Case, InputSpec


def naive_softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax of `x` [N, M] over its rows."""
    m = x.max(dim=1)[0]
    z = x - m[:, None]
    e = torch.exp(z)
    s = e.sum(dim=1)
    return e / s[:, None]


def case(*, N: int = 4000, M: int = 5000, dtype: str = "fp32", name: str = "softmax") -> Case:
    """In inference, where nobody reads the indices that `max` writes; backward would."""
    return Case(name, lambda: naive_softmax, [InputSpec.parse(f"{dtype}[N={N},M={M}]")], training=False)


softmax = case()
small = case(N=100, name="small")
