"""Attention written out: the N×N scores and weights that a flash kernel never puts into memory.

Both products take 2·B·N²·d multiply-adds, 4·B·N²·d FLOPs in all, fused or not; fusing removes the N²
bytes. In `square`, N and d have the same size and still count as two dimensions.

    tilewright explain examples/attention.py:attention --on h200
"""

from __future__ import annotations

import math

import torch

from tilewright.records.case import Case, InputSpec


def naive_attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """`softmax(q kᵀ / √d) v` for q, k, v [B, N, d]; returns [B, N, d]."""
    scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
    return torch.softmax(scores, dim=-1) @ v


def case(*, B: int = 32, N: int = 1024, d: int = 128, dtype: str = "fp32", name: str = "attention") -> Case:
    spec = InputSpec.parse(f"{dtype}[B={B},N={N},d={d}]")
    return Case(name, lambda: naive_attention, [spec, spec, spec])


attention = case()
square = case(N=128, name="square")
