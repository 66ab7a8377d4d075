"""Rotary embedding as models spell it: one kernel for each tensor, forward and backward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright
from tests.contract import keeps_contract, launched
from tests.gpu.kernels.launching import in_turn


def rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), dim=-1)


def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def partial_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """The first part of each head turns, the rest stays."""
    size = cos.shape[-1]
    turned = rotary(q[..., :size], k[..., :size], cos, sin)
    return torch.cat([turned[0], q[..., size:]], -1), torch.cat([turned[1], k[..., size:]], -1)


def inputs(dtype: torch.dtype, angles: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    q, k = (torch.randn(2, heads, 17, 48, generator=generator, dtype=torch.float64) for heads in (6, 2))
    angle = torch.randn(2, 17, angles, generator=generator, dtype=torch.float64)
    return [q.to(dtype).requires_grad_(), k.to(dtype).requires_grad_(), angle.cos().to(dtype), angle.sin().to(dtype)]


@pytest.mark.parametrize("device", ["cpu", "h200"])
@pytest.mark.parametrize(("function", "angles"), [(rotary, 48), (partial_rotary, 32)])
def test_one_kernel_for_each_tensor_is_planned(device: str, function: Callable[..., Any], angles: int) -> None:
    q, k, cos, sin = inputs(torch.bfloat16, angles)
    program = tilewright.explain(lambda q, k: function(q, k, cos, sin), q, k, on=device, training=True).program
    for graph in ("forward", "backward"):
        after = [
            o for o in program.operators if (o.graph, o.stage) == (graph, "after") and o.operator_class != "layout"
        ]
        assert [o.target for o in after] == ["kernel"] * 2, graph


@pytest.mark.parametrize(
    ("function", "angles", "dtype"),
    in_turn([(rotary, 48), (partial_rotary, 32)], [(torch.float32, torch.bfloat16)]),
)
def test_results_and_gradients(dtype: torch.dtype, function: Callable[..., Any], angles: int) -> None:
    assert launched(keeps_contract(function, inputs(dtype, angles))) == ["kernel"] * 4
