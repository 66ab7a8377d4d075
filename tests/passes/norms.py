"""Models around norms, as transformers write them."""

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
        result: Tensor = h * 0.5 + self.down(F.silu(self.second(h)))
        return result


class Written(nn.Module):
    """An RMS norm that is written out, one spelling for each family of models."""

    def __init__(self, columns: int, *, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(columns, dtype=dtype))


class Llama(Written):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


class T5(Written):
    def forward(self, x: Tensor) -> Tensor:
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        x = x * torch.rsqrt(variance + 1e-6)
        if self.weight.dtype in (torch.float16, torch.bfloat16):
            x = x.to(self.weight.dtype)
        return self.weight * x


class Gemma(Written):
    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-6)
        return (wide * (1.0 + self.weight.float())).type_as(x)


WRITTEN = [Llama, T5, Gemma, nn.RMSNorm]


class Alone(nn.Module):
    """A norm without a weight and without a sum beside it."""

    def forward(self, x: Tensor, r: Tensor) -> Tensor:
        return F.layer_norm(x, (x.shape[-1],)) @ r.mT


class Across(nn.Module):
    """A stream that lies along its places, as behind a convolution over time, and two norms on it."""

    def __init__(self, dtype: torch.dtype, width: int = WIDTH) -> None:
        super().__init__()
        self.first, self.second = (nn.LayerNorm(width, dtype=dtype) for _ in range(2))
        self.up = nn.Linear(width, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(x).transpose(1, 2)
        result: Tensor = self.second(h + self.up(self.first(h)))
        return result


def inputs(dtype: torch.dtype, width: int = WIDTH) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    first, second = (torch.randn(2, 5, width, generator=generator).to(dtype).requires_grad_() for _ in range(2))
    return first, second
