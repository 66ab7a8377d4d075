"""No-ops are removed, also casts and copies; results, layouts, draws and writes do not change."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu.kernels.launching import FOUR, in_turn
from tests.passes.graphs import aten, calls, run
from tilewright.compile.stages import EACH_GRAPH, JOINT
from tilewright.hardware.target import target_named
from tilewright.passes.pointwise import leaky_gradient_from_result
from tilewright.passes.simplify import drop_round_trips, drop_unread, simplify

CPU = target_named("cpu")
X = torch.linspace(-2, 2, 12).reshape(3, 4)


def test_two_results_stay_two_tensors() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.exp(), x.exp()

    graph = aten(program, X)
    simplify(graph, CPU)
    first, second = run(graph, X)
    first.add_(1)
    assert torch.equal(second, X.exp())


def test_a_result_that_equals_an_input_stays_its_own_node() -> None:
    graph = aten(lambda x: (x.detach(), x.view(3, 4)), X)
    simplify(graph, CPU)
    results = graph.output_node().args[0]
    assert isinstance(results, tuple) and len({*results, *(n for n in graph.nodes if n.op == "placeholder")}) == 3


def test_a_second_run_finds_nothing() -> None:
    graph = aten(lambda x: (x.exp() + x.exp().t().t()).detach(), X)
    simplify(graph, CPU)
    once = calls(graph)
    simplify(graph, CPU)
    assert calls(graph) == once == ["exp.default", "add.Tensor"]


@pytest.mark.parametrize("of_gradient", [False, True])
def test_in_training_only_a_gradient_may_be_what_the_graph_made(of_gradient: bool) -> None:
    def function(dy: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (dy.cos(), (dy * x if of_gradient else x.sin()).float().view(-1).bfloat16())

    x = torch.randn(6, 8, dtype=torch.bfloat16)
    graph = aten(function, x.clone(), x)
    next(iter(graph.nodes)).target = "tangents_1"
    drop_round_trips(graph)
    drop_unread(graph)
    assert any("_to_copy" in call for call in calls(graph)) == (not of_gradient)


def read_index(x: Tensor, index: Tensor) -> list[Tensor]:
    rows, columns = index.shape
    sent, zeros, row = x[:rows, :columns], torch.zeros_like(x), index[:, 0]
    return [
        zeros.scatter_add(0, index, sent), zeros.scatter_reduce(0, index, sent, "amax"),
        zeros.index_add(0, row, x[:rows]), zeros.index_put((row,), x[:rows], accumulate=True),
        F.embedding(index, x * 2), F.cross_entropy(x[:rows], row), x[x[row].argsort(0)[:, 0]], row.sort()[0],
    ]  # fmt: skip


def read_numbers(x: Tensor, q: Tensor) -> list[Tensor]:
    weight = x.reshape(-1)[: q.shape[1]].expand(3, q.shape[1])
    return [
        F.leaky_relu(F.linear(q, weight, x[0, :3])), q.log_softmax(-1)[:, 0], F.layer_norm(q, q.shape[1:]),
        F.rms_norm(q, q.shape[1:]), F.dropout(q, 0.5), torch.cat([q, q]), q.to(torch.bfloat16).sum(0),
        F.conv1d(q[None, :1], x[None, :1, :1]), F.nll_loss(q, torch.zeros_like(q[:, 0], dtype=torch.int64)),
    ]  # fmt: skip


def program(given: Tensor) -> list[Tensor]:
    x = given.detach().requires_grad_()
    indices = [x.cummin(0)[1], x.max(0, keepdim=True)[1], x.topk(8, 1)[1]]
    numbers = [
        torch.var_mean(x, 0, keepdim=True)[1], torch.native_layer_norm(x, [16], None, None, 1e-5)[0],
        torch.frexp(x.detach())[0], x.split(4, 1)[1],
    ]  # fmt: skip
    found = [y for index in indices for y in read_index(x, index)]
    found += [y for q in numbers for y in read_numbers(x, q)]
    return [*found, *torch.autograd.grad(torch.stack([y.sum() for y in found]).sum(), x)]


def test_rewrites_see_one_of_several_results_as_a_tensor() -> None:
    """In strict mode a rewrite that raises is an error."""
    graph, target = aten(program, torch.randn(8, 16)), target_named("h200")
    for stage in (JOINT, EACH_GRAPH):
        stage.run(graph, target)
    graph.lint()


ops = torch.ops.aten
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1.0, -1.0, 3e38, -3e38, math.inf, -math.inf, math.nan]


def with_gradient(slope: float, of_gradient: float | None = None) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
    def function(x: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
        y = ops.leaky_relu(x, slope)
        return y, ops.leaky_relu_backward(g, x, slope if of_gradient is None else of_gradient, False)

    return function


@pytest.mark.parametrize(("slope", "dtype"), in_turn([0.01, 0.3, 1.0, 2.5, 0.0], FOUR), ids=str)
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
