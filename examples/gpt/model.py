"""A byte-level GPT: pre-norm blocks, causal attention, tied embeddings; [B, S] bytes to a loss or to logits."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

BYTES = 256


@dataclass(frozen=True)
class Shape:
    """Layers, heads, width, sequence, and the probability with which dropout drops."""

    layers: int = 8
    heads: int = 12
    width: int = 768
    sequence: int = 1024
    dropout: float = 0.1


class Block(nn.Module):
    """x + attention(norm(x)), then x + feed_forward(norm(x)); [B, S, D] → [B, S, D]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.p = shape.heads, shape.dropout
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.project = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Linear(shape.width, shape.width)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + F.dropout(self.out(self.attention(self.norm1(x))), self.p, self.training)
        return x + F.dropout(self.down(F.gelu(self.up(self.norm2(x)))), self.p, self.training)

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (self.heads, -1)).transpose(1, 2) for y in self.project(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)


class GPT(nn.Module):
    """Bytes [B, S] to logits [B, S, 256], or with `targets` [B, S] to the mean cross entropy in nats."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens, self.places = nn.Embedding(BYTES, shape.width), nn.Embedding(shape.sequence, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # As GPT-2: the residual branches' last layers are scaled by their number.
                depth = (2 * shape.layers) ** 0.5 if name.endswith(("out.weight", "down.weight")) else 1.0
                nn.init.normal_(parameter, std=0.02 / depth)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        x = F.dropout(x, self.shape.dropout, self.training)
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    def flops_per_token(self) -> int:
        """FLOPs of training: 6 per parameter of a product, and 12·L·S·D / 2 for causal attention (PaLM, appendix B)."""
        products = sum(p.numel() for p in self.parameters() if p.dim() == 2) - self.places.weight.numel()
        return 6 * products + 6 * self.shape.layers * self.shape.sequence * self.shape.width


@torch.no_grad()
def sample(model: GPT, prompt: bytes, length: int, temperature: float = 0.8, top: int = 50) -> bytes:
    """`prompt` and `length` bytes after it, drawn from the `top` likeliest at a temperature."""
    model.eval()
    device = model.tokens.weight.device
    text = torch.tensor([list(prompt)], device=device)
    for _ in range(length):
        logits = model(text[:, -model.shape.sequence :])[0, -1].float() / temperature
        likely, place = logits.topk(min(top, BYTES))
        drawn = place[torch.multinomial(likely.softmax(-1), 1)]
        text = torch.cat([text, drawn[None]], 1)
    model.train()
    return bytes(text[0].tolist())
