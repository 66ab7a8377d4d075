"""GELU's tanh form written out: nine pointwise operators that need only one pass over memory.

tilewright optimize examples/manual_gelu.py:gelu
"""

from __future__ import annotations

import torch

from tilewright.records.case import Case, InputSpec


def manual_gelu(x: torch.Tensor) -> torch.Tensor:
    """`0.5·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))`, elementwise; Hendrycks and Gimpel, arXiv:1606.08415."""
    return 0.5 * x * (1 + torch.tanh(0.79788456 * (x + 0.044715 * x * x * x)))


def case(*, N: int = 4096, M: int = 4096, dtype: str = "fp32", name: str = "gelu") -> Case:
    return Case(name, lambda: manual_gelu, [InputSpec.parse(f"{dtype}[N={N},M={M}]")])


gelu = case()
