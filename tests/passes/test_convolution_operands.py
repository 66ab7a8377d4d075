"""Operands of channels-last convolutions: which are copied, and that the results stay."""

import torch
from torch import Tensor

from tests.passes.graphs import aten, calls, run
from tilewright.graph.layouts import lies_channels_last
from tilewright.hardware.target import target_named
from tilewright.passes.convolution.channels_last import lay_operands

H200 = target_named("h200")


def gradients(a: Tensor, b: Tensor, x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    g = torch.cat([a.sin(), b.cos()], 1).unsqueeze(2)
    backward = torch.ops.aten.convolution_backward.default
    dx, dw, _ = backward(g, x, w, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [True, True, False])
    return dx, dw, g.sum((0, 2, 3))


def operands(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_gradient_is_copied_once_for_all_its_readers() -> None:
    a, b, x, w = operands(2, 4, 9), operands(2, 4, 9), operands(2, 6, 1, 11), operands(8, 6, 1, 3)
    x, w = (tensor.contiguous(memory_format=torch.channels_last) for tensor in (x, w))
    wanted, graph = gradients(a, b, x, w), aten(gradients, a, b, x, w)
    lay_operands(graph, H200)
    (backward,) = graph.find_nodes(op="call_function", target=torch.ops.aten.convolution_backward.default)
    assert all(lies_channels_last(node.meta["val"]) for node in backward.all_input_nodes)
    assert calls(graph).count("clone.default") == 1
    (copy,) = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert {str(user.target) for user in copy.users} == {"aten.convolution_backward.default", "aten.sum.dim_IntList"}
    for mine, eager in zip(run(graph, a, b, x, w), wanted, strict=True):
        torch.testing.assert_close(mine, eager)


def test_contiguous_convolutions_and_weights_of_one_place_ask_for_nothing() -> None:
    for width in (3, 1):
        given = operands(2, 4, 9), operands(2, 4, 9), operands(2, 6, 1, 8 + width), operands(8, 6, 1, width)
        graph = aten(gradients, *given)
        before = calls(graph)
        lay_operands(graph, H200)
        assert calls(graph) == before
