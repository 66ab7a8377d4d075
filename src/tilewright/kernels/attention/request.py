"""A call of attention as plain data, from which implementations are chosen and launches planned."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from tilewright.launch.builder import Operand

TensorLike = torch.Tensor | Operand
"""Has a shape, strides, a dtype, a device and an address."""
Strides = tuple[int, int, int, int]
Mask = Literal["none", "boolean", "additive"]
FEW_KEYS, FEW_QUERIES = 64, 16
MIN_SCALAR_WIDTH = 64
"""Columns to which 16-bit tiles are padded where they are loaded one element at a time (`padded_widths` says why)."""
DIVISIBILITY = 16
"""Triton specialises integer arguments that are multiples of this; only then it loads vectors."""


class Request(NamedTuple):
    """A call without its tensors; hashable, so that plans and kernels are cached by it.

    Every tensor is [batch, heads, positions, head size]. Packed sequences are one batch entry whose positions
    are those of all sequences, one after another. Strides are in elements, that of the last axis is 1.
    """

    device: torch.device
    dtype: torch.dtype
    batch: int
    heads: int
    kv_heads: int
    """Divides `heads`: query head h uses key and value head h // (heads // kv_heads)."""
    queries: int
    """Positions of q: its length, or the sum over packed sequences."""
    keys: int
    head_size: int
    value_size: int
    q_strides: Strides
    k_strides: Strides
    v_strides: Strides
    aligned: bool
    """Whether q, k and v begin at multiples of 16 bytes and their strides are multiples of 16 bytes."""
    scale: float
    left: int | None
    """Query i of Sq sees key j of Sk only where j - (i + Sk - Sq) ≥ -left; None: no limit."""
    right: int | None
    """... and only where j - (i + Sk - Sq) ≤ right; 0 is causal, aligned to the end; None: no limit."""
    softcap: float = 0.0
    """Scaled scores s become softcap · tanh(s / softcap) before anything is added; 0: none."""
    mask: Mask = "none"
    alibi: bool = False
    dropout: float = 0.0
    sequences: int = 0
    """Packed sequences, or 0 where each batch entry is one sequence of full length."""
    longest_q: int = 0
    """Queries of the longest packed sequence, as the caller says; 0 where nothing is packed."""
    longest_k: int = 0
    deterministic: bool = False
    """Whether the backward must give the same bits in every run."""
    tf32: bool = False
    """Whether products of fp32 may use TF32, as `torch.set_float32_matmul_precision` says."""

    @property
    def causal(self) -> bool:
        """Whether exactly the keys after a query's own position are hidden."""
        return self.right == 0 and self.left is None

    @property
    def banded(self) -> bool:
        """Whether positions hide keys."""
        return self.left is not None or self.right is not None

    @property
    def is_short(self) -> bool:
        """Whether rows may have a weight near one, so that dP - Δ cancels, and another pass over the keys is cheap."""
        return (self.longest_k or self.keys) <= FEW_KEYS or (self.longest_q or self.queries) <= FEW_QUERIES

    @property
    def single_key(self) -> bool:
        """Whether every query sees at most one key: its weight is one whatever the score."""
        return self.keys == 1 or (self.left is not None and self.right is not None and self.left + self.right == 0)

    @property
    def group(self) -> int:
        """Query heads that share a key and value head."""
        return self.heads // self.kv_heads


def strides_of(tensor: TensorLike | None) -> Strides:
    """Strides of a tensor of four axes; zeros for None."""
    return (0, 0, 0, 0) if tensor is None else (tensor.stride(0), tensor.stride(1), tensor.stride(2), tensor.stride(3))
