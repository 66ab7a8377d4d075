"""The gradient of a leaky ReLU reads its result."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import aten, run
from tilewright.hardware.target import target_named
from tilewright.passes.pointwise import leaky_gradient_from_result

ops = torch.ops.aten
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 3e38, -3e38, math.inf, -math.inf, math.nan]


def with_gradient(slope: float, of_gradient: float | None = None) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def function(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        y = ops.leaky_relu(x, slope)
        return y, ops.leaky_relu_backward(g, x, slope if of_gradient is None else of_gradient, False)

    return function


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("slope", [0.01, 0.3, 1.0, 2.5, 0.0])
def test_the_gradient_is_the_same(slope: float, dtype: torch.dtype) -> None:
    x = torch.tensor(SPECIAL, dtype=dtype)
    g = torch.arange(1.0, len(SPECIAL) + 1).to(dtype)
    graph = aten(with_gradient(slope), x, g)
    leaky_gradient_from_result(graph, target_named("cpu"))
    (gradient,) = graph.find_nodes(op="call_function", target=ops.leaky_relu_backward.default)
    assert gradient.args[1].target is ops.leaky_relu.default
    for ours, eagers in zip(run(graph, x, g), with_gradient(slope)(x, g), strict=True):
        torch.testing.assert_close(ours, eagers, rtol=0, atol=0, equal_nan=True)


def backward_alone(x: Tensor, g: Tensor) -> Tensor:
    return ops.leaky_relu_backward(g, x, 0.1, False)


def of_a_result(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    y = ops.leaky_relu(x, 0.1)
    return y, ops.leaky_relu_backward(g, y, 0.1, True)


@pytest.mark.parametrize(
    "function",
    [with_gradient(-0.1), with_gradient(0.1, 0.2), backward_alone, of_a_result],
    ids=["a negative slope", "other slopes", "without forward", "of the result"],
)
def test_what_stays(function: Callable[..., object]) -> None:
    x = torch.randn(7)
    graph = aten(function, x, x)
    before = [node.args for node in graph.nodes]
    leaky_gradient_from_result(graph, target_named("cpu"))
    assert [node.args for node in graph.nodes] == before
