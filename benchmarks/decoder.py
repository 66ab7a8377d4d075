"""A decoder of one token with a static cache: Llama's blocks, or GPT-2's."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class DecoderConfig:
    """`rotary`: Llama's block (RMS norm, rotary embedding, SwiGLU); else GPT-2's (layer norm, learned positions)."""

    width: int
    hidden: int
    layers: int
    heads: int
    groups: int
    """Heads of keys and values."""
    vocabulary: int
    length: int
    """Length of the cache, in tokens."""
    rotary: bool


class Decoder(nn.Module):
    """Token `ids` [B, 1] at `position` [1] → logits [B, vocabulary]; the caches are buffers that the call writes.

    Every call attends to all tokens of the caches up to `position`, by a mask over their whole length.
    """

    def __init__(self, config: DecoderConfig, batch: int) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.positions = None if config.rotary else nn.Embedding(config.length, config.width)
        self.blocks = nn.ModuleList(Block(config, batch) for _ in range(config.layers))
        self.norm = _norm(config)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, ids: Tensor, position: Tensor) -> Tensor:
        x: Tensor = self.embedding(ids)
        if self.positions is not None:
            x = x + self.positions(position)
        mask = torch.arange(self.config.length, device=ids.device) <= position
        for block in self.blocks:
            x = block(x, position, mask)
        logits: Tensor = self.head(self.norm(x)[:, 0])
        return logits


class Block(nn.Module):
    """Pre-norm attention over the cache, then the feed-forward layer."""

    keys: Tensor
    values: Tensor

    def __init__(self, config: DecoderConfig, batch: int) -> None:
        super().__init__()
        self.config = config
        size = config.width // config.heads
        self.norms = nn.ModuleList(_norm(config) for _ in range(2))
        bias = not config.rotary
        self.query = nn.Linear(config.width, config.width, bias=bias)
        self.key = nn.Linear(config.width, config.groups * size, bias=bias)
        self.value = nn.Linear(config.width, config.groups * size, bias=bias)
        self.project = nn.Linear(config.width, config.width, bias=bias)
        self.gate = nn.Linear(config.width, config.hidden, bias=False) if config.rotary else None
        self.up = nn.Linear(config.width, config.hidden, bias=bias)
        self.down = nn.Linear(config.hidden, config.width, bias=bias)
        cache = batch, config.groups, config.length, size
        self.register_buffer("keys", torch.randn(cache))
        self.register_buffer("values", torch.randn(cache))

    def forward(self, x: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x), position, mask)
        y = self.norms[1](x)
        up = self.up(y)
        active = functional.gelu(up, approximate="tanh") if self.gate is None else functional.silu(self.gate(y)) * up
        down: Tensor = self.down(active)
        return x + down

    def attention(self, x: Tensor, position: Tensor, mask: Tensor) -> Tensor:
        q = self._by_head(self.query(x), self.config.heads)
        k = self._by_head(self.key(x), self.config.groups)
        v = self._by_head(self.value(x), self.config.groups)
        if self.config.rotary:
            q, k = rotate(q, position), rotate(k, position)
        self.keys[:, :, position] = k
        self.values[:, :, position] = v
        grouped = self.config.groups < self.config.heads
        y = functional.scaled_dot_product_attention(
            q, self.keys, self.values, mask[None, None, None], enable_gqa=grouped
        )
        found: Tensor = self.project(y.transpose(1, 2).flatten(2))
        return found

    def _by_head(self, x: Tensor, heads: int) -> Tensor:
        return x.unflatten(2, (heads, -1)).transpose(1, 2)


def rotate(x: Tensor, position: Tensor) -> Tensor:
    """Rotary embedding of x [B, heads, 1, D] at one position, in fp32."""
    half = x.shape[-1] // 2
    frequencies = 10000.0 ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angles = position[:, None].float() * frequencies
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x[..., :half], x[..., half:]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def _norm(config: DecoderConfig) -> nn.Module:
    return nn.RMSNorm(config.width) if config.rotary else nn.LayerNorm(config.width)
