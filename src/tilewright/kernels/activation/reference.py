"""The formulas of the activations in plain PyTorch operators, step by step, for any floating dtype."""

from __future__ import annotations

import math

import torch


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """x·Φ(x), with Φ by erf, or by tanh as Hendrycks & Gimpel (arXiv:1606.08415) also give it."""
    if approximate == "tanh":
        inner = math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1.0 + torch.tanh(inner))
    return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))


def silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x))"""
    return x / (1.0 + torch.exp(-x))


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """silu(gate)·up"""
    return silu(gate) * up


def geglu(gate: torch.Tensor, up: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """gelu(gate)·up"""
    return gelu(gate, approximate) * up
