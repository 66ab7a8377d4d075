"""Calls of libraries as matrix products: as many FLOPs as the operator table counts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.graphs import aten
from tilewright.cost.kinds import call_work
from tilewright.cost.operators import operator_cost
from tilewright.cost.work import Work
from tilewright.graph.dims import symbolic_shapes


def works(function: Callable[..., Any], *inputs: Tensor) -> dict[str, Work]:
    """Of the products, convolutions and attention among the operators."""
    graph = aten(function, *inputs)
    shapes = symbolic_shapes(graph, {}, {})
    found = {node: call_work(node, operator_cost(node, shapes)) for node in graph.nodes if node.op == "call_function"}
    return {work.kind: work for work in found.values() if work.products}


def flops(work: Work) -> int:
    return sum(2 * batch * m * n * k for batch, m, n, k in work.products)


def gradients(x: Tensor, w: Tensor, stride: int, padding: int) -> list[Tensor]:
    y = F.conv2d(x, w, stride=stride, padding=padding)
    options: Any = (None, [stride] * 2, [padding] * 2, [1, 1], False, [0, 0], 1, [True, True, False])
    found: list[Tensor] = torch.ops.aten.convolution_backward(y, x, w, *options)
    return found


@pytest.mark.parametrize(("size", "taps", "stride"), [(8, 3, 1), (8, 2, 2), (8, 1, 1)])
def test_a_convolution_and_its_gradients_are_products(size: int, taps: int, stride: int) -> None:
    x = torch.ones(2, 16, size, size).contiguous(memory_format=torch.channels_last)
    found = works(lambda x, w: gradients(x, w, stride, taps // 3), x, torch.ones(32, 16, taps, taps))
    forward, backward = (
        next(w for k, w in found.items() if k.startswith(name)) for name in ("convolution", "convolution backward")
    )
    pixels = 2 * (size // stride) ** 2
    assert forward.products == ((1, pixels, 32, 16 * taps**2),) and flops(forward) == forward.flops
    assert len(backward.products) == 2 and flops(backward) == backward.flops == 2 * forward.flops


def test_groups_of_channels_are_no_product() -> None:
    def function(x: Tensor, deep: Tensor, grouped: Tensor) -> tuple[Tensor, Tensor]:
        return F.conv2d(x, deep, groups=16), F.conv2d(x, grouped, groups=4)

    graph = aten(function, torch.ones(1, 16, 4, 4), torch.ones(16, 1, 3, 3), torch.ones(16, 4, 3, 3))
    shapes = symbolic_shapes(graph, {}, {})
    calls = [node for node in graph.nodes if node.op == "call_function"]
    found = [call_work(node, operator_cost(node, shapes)) for node in calls]
    assert [work.kind for work in found] == ["convolution, depthwise", "convolution, grouped"]
    assert not any(work.products for work in found)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_is_the_product_of_weights_and_values(causal: bool) -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)[0]  # type: ignore[no-any-return]

    q, k = torch.ones(2, 3, 64, 16), torch.ones(2, 3, 128, 16)
    (work,) = works(function, q, k, k).values()
    ((batch, rows, width, depth),) = work.products
    assert (batch, rows, width) == (6, 64, 16) and depth == 2 * 128 // (2 if causal else 1)
    assert flops(work) == work.flops and work.draws == 0
