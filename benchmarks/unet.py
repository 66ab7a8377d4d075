"""A small diffusion U-Net: residual blocks with group norm and an embedding of time, attention at low resolution."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class UNet(nn.Module):
    """Images [B, channels, H, W] and times [B] → noise of the images' shape; H and W are multiples of 2^(levels - 1).

    Level i has `width` · 2^i channels; the last has attention with `heads` heads.
    """

    def __init__(self, channels: int, width: int, *, levels: int, heads: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        time = 4 * width
        self.width = width
        self.time = nn.Sequential(nn.Linear(width, time), nn.SiLU(), nn.Linear(time, time))
        self.begin = nn.Conv2d(channels, width, 3, padding=1)
        pairs = list(zip([width, *widths], widths, strict=False))
        self.down = nn.ModuleList(Residual(i, o, time) for i, o in pairs)
        self.shrink = nn.ModuleList(nn.Conv2d(w, w, 3, stride=2, padding=1) for w in widths[:-1])
        self.middle = nn.ModuleList((Residual(widths[-1], widths[-1], time), Attention(widths[-1], heads)))
        self.up = nn.ModuleList(Residual(2 * o, i, time) for i, o in reversed(pairs))
        self.end = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        t = self.time(embedded(times, self.width).to(x.dtype))
        x = self.begin(x)
        kept = []
        for level, block in enumerate(self.down):
            x = block(x, t)
            kept.append(x)
            if level < len(self.shrink):
                x = self.shrink[level](x)
        residual, attention = self.middle
        x = attention(residual(x, t))
        for level, block in enumerate(self.up):
            if level:
                x = functional.interpolate(x, scale_factor=2.0, mode="nearest")
            x = block(torch.cat((x, kept.pop()), 1), t)
        found: Tensor = self.end(x)
        return found


class Residual(nn.Module):
    """Two convolutions, each behind group norm and SiLU; the time is added between them."""

    def __init__(self, channels: int, out: int, time: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.GroupNorm(8, channels), nn.SiLU(), nn.Conv2d(channels, out, 3, padding=1))
        self.time = nn.Linear(time, out)
        self.second = nn.Sequential(nn.GroupNorm(8, out), nn.SiLU(), nn.Conv2d(out, out, 3, padding=1))
        self.skip = nn.Conv2d(channels, out, 1) if channels != out else nn.Identity()

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        y = self.first(x) + self.time(functional.silu(t))[:, :, None, None]
        found: Tensor = self.skip(x) + self.second(y)
        return found


class Attention(nn.Module):
    """Attention over all pixels."""

    def __init__(self, channels: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.GroupNorm(8, channels)
        self.qkv = nn.Conv2d(channels, 3 * channels, 1)
        self.project = nn.Conv2d(channels, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, channels, height, width = x.shape
        qkv = self.qkv(self.norm(x)).reshape(batch, 3, self.heads, channels // self.heads, height * width)
        q, k, v = qkv.transpose(-1, -2).unbind(1)
        y = functional.scaled_dot_product_attention(q, k, v)
        found: Tensor = x + self.project(y.transpose(-1, -2).reshape(x.shape))
        return found


def embedded(times: Tensor, width: int) -> Tensor:
    """Sines and cosines of times [B] at `width` / 2 frequencies each: [B, width] in fp32."""
    half = width // 2
    frequencies = torch.exp(-math.log(10000.0) * torch.arange(half, device=times.device, dtype=torch.float32) / half)
    angles = times[:, None].float() * frequencies
    return torch.cat((angles.cos(), angles.sin()), 1)
