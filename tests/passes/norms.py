"""Models around norms, as transformers write them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 48


class Residual(nn.Module):
    """Two norms on a residual stream, each before a product."""

    def __init__(self, dtype: torch.dtype, width: int = WIDTH, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        self.first, self.second = (norm(width, dtype=dtype) for _ in range(2))  # type: ignore[call-arg]
        self.up, self.down = (nn.Linear(width, width, dtype=dtype) for _ in range(2))
        with torch.no_grad():
            for layer in (self.first, self.second):
                for parameter in layer.parameters():
                    parameter.add_(torch.linspace(-0.5, 0.5, width).to(dtype))

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        h = x + r
        h = h + self.up(self.first(h))
        result: Tensor = h * 0.5 + self.down(F.relu(self.second(h)))
        return result


class Alone(nn.Module):
    """A norm without a weight and without a sum beside it."""

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],)) @ r.mT


def inputs(dtype: torch.dtype, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    first, second = (torch.randn(2, 5, width, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    return first, second
