"""A pre-norm Transformer block, forward and backward, with its attention written out.

LayerNorm → Q, K, V → heads → QKᵀ/√d → softmax → PV → merge → out-projection → residual →
LayerNorm → feed-forward up → GELU → feed-forward down → residual; each residual branch ends in dropout.

    tilewright optimize examples/transformer_block.py:block
"""

from __future__ import annotations

import math

import torch
from torch import nn

from tilewright.records.case import DTYPES, Case, InputSpec


class Block(nn.Module):
    """Width `D`, `H` heads of `D / H`, feed-forward width `4·D`; [B, S, D] → [B, S, D]."""

    def __init__(self, D: int, H: int, dropout: float) -> None:
        super().__init__()
        self.heads = H
        self.norm1 = nn.LayerNorm(D)
        self.query = nn.Linear(D, D)
        self.key = nn.Linear(D, D)
        self.value = nn.Linear(D, D)
        self.out = nn.Linear(D, D)
        self.norm2 = nn.LayerNorm(D)
        self.up = nn.Linear(D, 4 * D)
        self.down = nn.Linear(4 * D, D)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        return x + self.dropout(self.down(nn.functional.gelu(self.up(self.norm2(x)))))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (self.split(project(x)) for project in (self.query, self.key, self.value))
        scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
        mixed = torch.softmax(scores, dim=-1) @ v
        return self.out(mixed.transpose(1, 2).flatten(2))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        """Heads apart: [B, S, D] → [B, H, S, D / H]."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)


def case(
    *,
    D: int = 256,
    H: int = 8,
    B: int = 4,
    S: int = 512,
    dropout: float = 0.1,
    dtype: str = "fp32",
    name: str = "block",
) -> Case:
    def build() -> Block:
        return Block(D, H, dropout).to(getattr(torch, DTYPES[dtype]))

    return Case(name, build, [InputSpec.parse(f"{dtype}[B={B},S={S},D={D}]")], dims={"H": H})


block = case()
block_no_dropout = case(dropout=0.0, name="block_no_dropout")
block_large = case(D=768, H=12, B=2, S=1024, name="block_large")
block_large_no_dropout = case(D=768, H=12, B=2, S=1024, dropout=0.0, name="block_large_no_dropout")
block_bf16 = case(D=2048, H=16, B=8, S=2048, dtype="bf16", name="block_bf16")
