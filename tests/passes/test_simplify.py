"""No-ops are removed, also casts and copies; results, layouts, draws and writes do not change."""

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.gpu.kernels.launching import FOUR, in_turn
from tests.passes.graphs import aten, calls, run
from tilewright.compile.stages import EACH_GRAPH, JOINT
from tilewright.hardware.target import target_named
from tilewright.passes.copies import drop_copies, drop_round_trips
from tilewright.passes.pointwise import leaky_gradient_from_result
from tilewright.passes.simplify import drop_unread, simplify

CPU = target_named("cpu")
X = torch.linspace(-2, 2, 12).reshape(3, 4)


def simplified(function: Callable[..., Any], *inputs: Tensor) -> list[str]:
    """The operators left, after a check that results are bit for bit those of the whole program."""
    graph = aten(function, *inputs)
    simplify(graph, CPU)
    torch.manual_seed(0)
    ours = run(graph, *(t.clone() for t in inputs))
    torch.manual_seed(0)
    torch.testing.assert_close(ours, function(*(t.clone() for t in inputs)), rtol=0, atol=0, equal_nan=True)
    return calls(graph)


def unread(x: Tensor) -> Tensor:
    x.exp().sum()
    return x.sin()


@pytest.mark.parametrize(
    ("program", "left"),
    [
        (lambda x: x.exp() + x.exp(), ["exp.default", "add.Tensor"]),
        (
            lambda x: (x.exp() * 2).sum(0) + (x.exp() * 2).sum(0),
            ["exp.default", "mul.Tensor", "sum.dim_IntList", "add.Tensor"],
        ),
        (unread, ["sin.default"]),
        # A result and its twin inside merge into the result.
        (lambda x: (x.exp() + 1, x.exp()), ["exp.default", "add.Tensor"]),
    ],
)
def test_values_are_computed_once_and_only_where_they_are_read(program: Callable[..., Any], left: list[str]) -> None:
    assert simplified(program, X) == left


@pytest.mark.parametrize(
    "same",
    [
        lambda x: torch.ops.aten.alias(x.sin().detach()).cos(),
        lambda x: x.sin().view(3, 4).cos(),
        lambda x: x.sin().expand(3, 4).cos(),
        lambda x: x.sin().t().t().cos(),
    ],
)
def test_no_ops_vanish(same: Callable[[Tensor], Tensor]) -> None:
    left = simplified(same, X)
    assert left[:1] + left[-1:] == ["sin.default", "cos.default"]
    assert not {"detach.default", "alias.default", "view.default", "expand.default"} & set(left)


def test_a_view_that_changes_the_strides_stays() -> None:
    assert "expand.default" in simplified(lambda x: x[:1].expand(3, 4) + x, X)


def test_equal_numbers_of_other_types_are_other_programs() -> None:
    # 2 and 2.0, True and 1: equal to Python, not to an operator that promotes.
    whole = torch.arange(4)
    left = simplified(lambda x: (x + 2, x + 2.0, torch.full((1,), True), torch.full((1,), 1)), whole)
    assert Counter(left) == {"add.Tensor": 2, "full.default": 2}


def test_draws_are_neither_merged_nor_dropped() -> None:
    def program(x: Tensor) -> Tensor:
        torch.rand_like(x)
        return torch.rand_like(x) - torch.rand_like(x)

    assert Counter(simplified(program, X))["rand_like.default"] == 3


def test_the_order_of_draws_stays() -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        first = torch.randn_like(x)
        second = torch.rand_like(x)
        return second.exp(), first.exp()

    left = simplified(program, X)
    assert left.index("randn_like.default") < left.index("rand_like.default")


def test_writes_stay() -> None:
    def program(x: Tensor, out: Tensor) -> Tensor:
        out.copy_(x.exp())
        return x.exp() + 1

    graph = aten(program, X, torch.zeros(3, 4))
    simplify(graph, CPU)
    out = torch.zeros(3, 4)
    run(graph, X, out)
    assert torch.equal(out, X.exp())
    assert Counter(calls(graph)) == {"exp.default": 1, "copy_.default": 1, "add.Tensor": 1}


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


def beside_its_source(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    return y, y.float().view(-1).bfloat16()


Function = Callable[[Tensor], tuple[Tensor, ...]]
DROPPED: dict[str, Function] = {
    "inside": lambda x: (x.sin().float().view(-1).bfloat16().cos(),),
    "result": lambda x: (x.sin().float().view(-1).bfloat16(),),
}
KEPT: dict[str, Function] = {
    "of rows with gaps": lambda x: (x[:, :5].float().view(2, 3, 5).bfloat16().cos(),),
    "of an input": lambda x: (x.float().view(-1).bfloat16(),),
    "beside its source": beside_its_source,
    "narrowed": lambda x: (x.sin().to(torch.float8_e5m2).bfloat16().cos(),),
    "closing gaps": lambda x: (x.sin()[:, :5].float().view(-1).bfloat16().cos(),),
}


@pytest.mark.parametrize("name", [*DROPPED, *KEPT])
def test_round_trips(name: str) -> None:
    function, x = (DROPPED | KEPT)[name], torch.randn(6, 8, dtype=torch.bfloat16)
    graph = aten(function, x)
    drop_round_trips(graph)
    drop_unread(graph)
    assert any("_to_copy" in call for call in calls(graph)) == (name in KEPT)
    for ours, theirs in zip(run(graph, x), function(x), strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


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


def copies(function: Callable[..., Any], *inputs: Tensor) -> int:
    """How many copies are left, after a check that results and inputs end as they do in eager."""
    graph = aten(function, *inputs)
    drop_copies(graph, CPU)
    ours, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    torch.testing.assert_close(run(graph, *ours), function(*theirs), rtol=0, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    return calls(graph).count("clone.default")


def written_later(x: Tensor) -> Tensor:
    e = x.exp()
    before = e.clone()
    e.t().add_(1)
    return before * 2 + e


@pytest.mark.parametrize(
    ("left", "program"),
    [
        # Inside, a copy is needless.
        (0, lambda x: x.exp().clone().sin()),
        (0, lambda x: (e := x.exp()).clone() @ e.t()),
        (0, lambda x: x.exp().t().clone().t().sin()),
        (0, lambda x: x.exp().clone().clone().clone().sum()),
        # A result is its own tensor.
        (1, lambda x: x.clone()),
        (1, lambda x: x.exp().clone()),
        (1, lambda x: x.clone().t()),
        (1, lambda x: x.clone().split(2, 1)[0]),
        (1, lambda x: x.exp().t().clone().detach()[:1]),
        # The caller may write to the original before backward looks at the copy.
        (1, lambda x: (x.clone().sin(), x)),
        (1, lambda x: ((e := x.exp()), e.clone().sin())),
        # Another layout, and a beginning at a multiple of 16 bytes.
        (1, lambda x: x.exp().t().clone(memory_format=torch.contiguous_format).sin()),
        (1, lambda x: x.exp().flatten()[1:].clone().sin()),
        (0, lambda x: x.exp().flatten()[4:].clone().sin()),
        # Writes to the original or to the copy.
        (1, written_later),
        (1, lambda x: (e := x.exp()).clone().mul_(2) + e),
    ],
)
def test_copies_that_are_left(left: int, program: Callable[[Tensor], Any]) -> None:
    assert copies(program, X) == left


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
