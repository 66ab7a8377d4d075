"""The tail of a feed-forward layer: GELU, dropout and a residual addition, three passes that fuse into one.

The fused kernel draws the very mask that eager draws from the same generator state.

    tilewright optimize examples/gelu_dropout_residual.py:gelu_dropout_residual
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tilewright.records.case import Case, InputSpec

DROPOUT = 0.1


def tail(x: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
    """`dropout(gelu(x)) + r`, both [N, M]."""
    return F.dropout(F.gelu(x), DROPOUT) + r


def case(*, N: int = 4096, M: int = 4096, dtype: str = "fp32", name: str = "gelu_dropout_residual") -> Case:
    spec = InputSpec.parse(f"{dtype}[N={N},M={M}]")
    return Case(name, lambda: tail, [spec, spec])


gelu_dropout_residual = case()
