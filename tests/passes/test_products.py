"""Products of matrices: made of sums of broadcast products, where their biases are added, added up in place."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract import keeps_contract
from tests.passes.graphs import aten, calls, run, stays
from tilewright.hardware.target import target_named
from tilewright.measure.truth.contract import compare
from tilewright.passes.products import FEW, add_biases_in_kernels, add_biases_in_products, contract, sum_few_terms

H200 = target_named("h200")


def given(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


def wide(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


A, B = wide(3, 37, 40), wide(3, 41, 40)
CONTRACTED: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "last axis": (lambda a, b: (a.unsqueeze(2) * b.unsqueeze(1)).sum(-1), [A, B]),
    "kept axis": (lambda a, b: (a.unsqueeze(2) * b.unsqueeze(1)).sum(-1, keepdim=True), [A, B]),
    "expanded operands": (
        lambda a, b: (a.unsqueeze(2).expand(3, 37, 41, 40) * b.unsqueeze(1).expand(3, 37, 41, 40)).sum(3),
        [A, B],
    ),
    "middle axis": (lambda a, b: (a.mT.unsqueeze(3) * b.mT.unsqueeze(2)).sum(1), [A, B]),
    "two axes": (lambda a, b: (a[:, :, None] * b[:, None]).sum((-1, 0)), [wide(5, 33, 32), wide(5, 31, 32)]),
    "fewer dimensions": (lambda a, b: (a.unsqueeze(1) * b).sum(-1), [wide(31, 40), wide(29, 40)]),
    "a transposed result": (lambda a, b: (b.unsqueeze(1) * a.unsqueeze(2)).sum(-1).mT, [A, B]),
    "axes between": (
        lambda a, b: (a[:, :, None] * b[:, None, :, :]).sum(3),
        [wide(64, 31, 32).mT.contiguous().mT, wide(64, 33, 32)],
    ),
    "an axis of one": (lambda a, b: (a[:, :, None, None] * b[:, None, None]).sum((2, 4)), [A, B]),
}
LEFT: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "one operand varies": (lambda a: (a * a.new_ones(1)).sum(-1), [A]),
    "few products": (lambda a, b: (a[:, :, None] * b[:, None]).sum(0), [wide(4, 17), wide(4, 19)]),
    "the products are read": (lambda a, b: (p := a.unsqueeze(2) * b.unsqueeze(1)).sum(-1) + p[..., 0], [A, B]),
    "integers": (lambda a, b: (a.long().unsqueeze(2) * b.long().unsqueeze(1)).sum(-1), [A, B]),
}


@pytest.mark.parametrize("name", CONTRACTED)
def test_products_give_the_sums(name: str) -> None:
    function, inputs = CONTRACTED[name]
    graph = aten(function, *inputs)
    (decision,) = contract(graph, target_named("cpu"))
    assert decision.verdict == "taken"
    assert "bmm.default" in calls(graph) and not any(call.startswith("sum") for call in calls(graph))
    wanted = function(*inputs)
    torch.testing.assert_close(run(graph, *inputs), wanted, rtol=1e-12, atol=1e-12)
    (output,) = graph.find_nodes(op="output")
    value = output.args[0].meta["val"]
    assert (value.shape, value.stride()) == (wanted.shape, wanted.stride())


@pytest.mark.parametrize(("function", "inputs"), LEFT.values(), ids=LEFT)
def test_other_sums_stay(function: Callable[..., Any], inputs: list[Tensor]) -> None:
    assert stays(lambda graph: contract(graph, target_named("cpu")), function, *inputs) == []


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def test_fp32_stays_where_products_would_lose_bits(tf32: None) -> None:
    graph = aten(CONTRACTED["last axis"][0], A.float(), B.float())
    assert contract(graph, target_named("cpu")) == []


X, W, BIAS, TURNED = (given(*shape).bfloat16() for shape in ((6, 7, 40), (24, 40), (24,), (6, 40, 7)))
ADDED: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "linear": (lambda x, w, b: (x.reshape(42, 40) @ w.t()).view(6, 7, 24) + b, [TURNED.mT, W, BIAS]),
    "two axes": (lambda x, w, b: x @ w.t() + b, [X[0], W, BIAS]),
    "bias first": (lambda x, w, b: b + (x.view(42, 40) @ w.t()).view(6, 7, 24), [X, W, BIAS]),
    "read twice": (lambda x, w, b: (y := x @ w.t() + b) * torch.relu(y), [X[0], W, BIAS]),
}
NOT_ADDED: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "no bias of columns": (lambda x, w, b: x[0] @ w.t() + b[:7, None], [X, W, BIAS]),
    "columns shown as rows": (lambda x, w, b: (x.view(42, 40) @ w[:7].t()).view(7, 42) + b.sum(), [X, W, BIAS]),
    "a transposed product": (lambda x, w, b: (x[0] @ w[:7].t()).t() + b[:7], [X, W, BIAS]),
    "the product is read": (lambda x, w, b: (y := x[0] @ w.t()) * (y + b), [X, W, BIAS]),
    "a wider bias": (lambda x, w, b: x[0] @ w.t() + b.float(), [X, W, BIAS]),
    "scaled": (lambda x, w, b: torch.add(x[0] @ w.t(), b, alpha=2), [X, W, BIAS]),
}


@pytest.mark.parametrize("name", ADDED)
def test_a_bias_is_added_in_the_product(name: str) -> None:
    function, inputs = ADDED[name]
    graph = aten(function, *inputs)
    add_biases_in_products(graph, H200)
    made = calls(graph)
    assert "addmm.default" in made and "mm.default" not in made and "add.Tensor" not in made
    got, eager = run(graph, *inputs), function(*inputs)
    assert compare(got, eager, function(*(x.double() for x in inputs))).ok
    assert got.stride() == eager.stride()


@pytest.mark.parametrize(("function", "inputs"), NOT_ADDED.values(), ids=NOT_ADDED)
def test_biases_of_other_sums_stay(function: Callable[..., Any], inputs: list[Tensor]) -> None:
    stays(lambda graph: add_biases_in_products(graph, H200), function, *inputs)


LINEAR = torch.nn.functional.linear
IN_KERNELS: dict[str, Callable[..., Any]] = {
    "an activation": lambda x, w, b: torch.tanh(LINEAR(x, w, b)),
    "a norm and a sum": lambda x, w, b: torch.layer_norm(y := LINEAR(x, w, b), [24]) + y.sum(0),
}
IN_THE_PRODUCT: dict[str, Callable[..., Any]] = {
    "a result": lambda x, w, b: (torch.tanh(y := LINEAR(x, w, b)), y),
    "read by a product": lambda x, w, b: torch.tanh(y := LINEAR(x, w, b)) @ y.mT,
    "scaled": lambda x, w, b: torch.tanh(torch.addmm(b, x[0], w.t(), beta=2)),
    "no bias of columns": lambda x, w, b: torch.tanh(torch.addmm(x[1, :, :1], x[0], w.t())),
}


@pytest.mark.parametrize("name", IN_KERNELS)
def test_on_a_cpu_a_bias_is_added_in_the_kernel_that_reads_it(name: str) -> None:
    function, inputs = IN_KERNELS[name], [X.float(), W.float(), BIAS.float()]
    graph = aten(function, *inputs)
    add_biases_in_kernels(graph, target_named("cpu"))
    assert "addmm.default" not in calls(graph)
    assert compare(run(graph, *inputs), function(*inputs), function(*(x.double() for x in inputs))).ok


@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        *((function, torch.float32) for function in IN_THE_PRODUCT.values()),
        (IN_KERNELS["an activation"], torch.bfloat16),
    ],
    ids=[*IN_THE_PRODUCT, "16 bits"],
)
def test_on_a_cpu_other_biases_stay(function: Callable[..., Any], dtype: torch.dtype) -> None:
    stays(
        lambda graph: add_biases_in_kernels(graph, target_named("cpu")), function, *(x.to(dtype) for x in (X, W, BIAS))
    )


def shared(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(x @ w)
    return x


def recurrent(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    h = x[:, 0] @ u
    for step in range(1, x.shape[1]):
        h = torch.tanh(h @ w + x[:, step] @ u)
    return h


def scaled(x: Tensor, w: Tensor) -> Tensor:
    """The sum of the products is read in the graph: it stays part of the kernel that scales it."""
    v = w * 2
    return torch.tanh(x @ v) @ v


def broadcast(x: Tensor, w: Tensor, row: Tensor) -> Tensor:
    """In backward the gradients of the weight are added up."""
    return x @ w + row @ w


def of_two_dtypes(x: Tensor, w: Tensor) -> Tensor:
    return x @ w + x.bfloat16() @ w.bfloat16()


@pytest.mark.parametrize(
    ("program", "shapes", "added"),
    [
        (shared, [(16, 24), (24, 24)], 3),
        (recurrent, [(8, 5, 12), (20, 20), (12, 20)], 3 + 4),
        (scaled, [(16, 24), (24, 24)], 0),
        (broadcast, [(16, 24), (24, 24), (1, 24)], 1),
        (of_two_dtypes, [(16, 24), (24, 24)], 0),
    ],
    ids=["shared", "recurrent", "scaled", "broadcast", "of two dtypes"],
)
def test_products_are_added_in_place_where_the_sum_is_a_result(
    program: Callable[..., Tensor], shapes: list[tuple[int, ...]], added: int
) -> None:
    record = keeps_contract(program, [given(*shape).requires_grad_() for shape in shapes])
    plans = [graph.plan for graph in record.graphs]
    in_place = [node for plan in plans for node in plan.graph.nodes if node.target is torch.ops.aten.addmm_.default]
    decisions = [decision for plan in plans for decision in plan.fusion.decisions if decision.passed_by == "products"]
    assert len(in_place) == len(decisions) == added


FEW_TERMS: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "batches": (torch.bmm, [given(5, 7, 3).bfloat16(), given(5, 3, 9).bfloat16()]),
    "one term and a bias": (lambda a, b, c: torch.addmm(c, a, b.t()), [given(7, 1), given(9, 1), given(9)]),
    "transposed, a wide bias": (
        lambda a, b, c: torch.addmm(c, a.t(), b),
        [given(FEW, 7).half(), given(FEW, 9).half(), given(7, 9).half()],
    ),
}


@pytest.mark.parametrize("name", FEW_TERMS)
def test_products_over_a_few_elements_are_sums(name: str) -> None:
    function, inputs = FEW_TERMS[name]
    graph = aten(function, *inputs)
    want = run(graph, *inputs)
    (decision,) = sum_few_terms(graph, H200)
    assert decision.verdict == "taken" and not any("mm." in call for call in calls(graph))
    found, truth = run(graph, *inputs), function(*(x.double() for x in inputs))
    assert found.is_contiguous() and compare(found, want, truth).ok
    assert stays(lambda g: sum_few_terms(g, H200), torch.mm, given(7, FEW + 1), given(FEW + 1, 9)) == []
