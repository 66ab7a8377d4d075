"""Sums of broadcast products become matrix products, and stay what eager computes."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import aten, calls, run
from tilewright.passes.contractions import contract


def given(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))


A, B = given(3, 37, 40), given(3, 41, 40)
CONTRACTED: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "last axis": (lambda a, b: (a.unsqueeze(2) * b.unsqueeze(1)).sum(-1), [A, B]),
    "kept axis": (lambda a, b: (a.unsqueeze(2) * b.unsqueeze(1)).sum(-1, keepdim=True), [A, B]),
    "expanded operands": (
        lambda a, b: (a.unsqueeze(2).expand(3, 37, 41, 40) * b.unsqueeze(1).expand(3, 37, 41, 40)).sum(3),
        [A, B],
    ),
    "middle axis": (lambda a, b: (a.mT.unsqueeze(3) * b.mT.unsqueeze(2)).sum(1), [A, B]),
    "two axes": (
        lambda a, b: (a[:, :, None] * b[:, None]).sum((-1, 0)),
        [given(5, 33, 32), given(5, 31, 32)],
    ),
    "fewer dimensions": (lambda a, b: (a.unsqueeze(1) * b).sum(-1), [given(31, 40), given(29, 40)]),
    "a transposed result": (lambda a, b: (b.unsqueeze(1) * a.unsqueeze(2)).sum(-1).mT, [A, B]),
    "axes between": (
        lambda a, b: (a[:, :, None] * b[:, None, :, :]).sum(3),
        [given(64, 31, 32).mT.contiguous().mT, given(64, 33, 32)],
    ),
    "an axis of one": (lambda a, b: (a[:, :, None, None] * b[:, None, None]).sum((2, 4)), [A, B]),
}
LEFT: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "one operand varies": (lambda a: (a * a.new_ones(1)).sum(-1), [A]),
    "few products": (lambda a, b: (a[:, :, None] * b[:, None]).sum(0), [given(4, 17), given(4, 19)]),
    "the products are read": (lambda a, b: (p := a.unsqueeze(2) * b.unsqueeze(1)).sum(-1) + p[..., 0], [A, B]),
    "integers": (
        lambda a, b: (a.long().unsqueeze(2) * b.long().unsqueeze(1)).sum(-1),
        [A, B],
    ),
}


@pytest.mark.parametrize("name", CONTRACTED)
def test_products_give_the_sums(name: str) -> None:
    function, inputs = CONTRACTED[name]
    graph = aten(function, *inputs)
    (decision,) = contract(graph)
    assert decision.verdict == "taken"
    assert "bmm.default" in calls(graph) and not any(call.startswith("sum") for call in calls(graph))
    wanted = function(*inputs)
    torch.testing.assert_close(run(graph, *inputs), wanted, rtol=1e-12, atol=1e-12)
    (output,) = graph.find_nodes(op="output")
    value = output.args[0].meta["val"]
    assert (value.shape, value.stride()) == (wanted.shape, wanted.stride())


@pytest.mark.parametrize("name", LEFT)
def test_other_sums_stay(name: str) -> None:
    function, inputs = LEFT[name]
    graph = aten(function, *inputs)
    before = calls(graph)
    assert not contract(graph)
    assert calls(graph) == before


@pytest.fixture
def tf32() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    yield
    torch.set_float32_matmul_precision(before)


def test_fp32_stays_where_products_would_lose_bits(tf32: None) -> None:
    graph = aten(CONTRACTED["last axis"][0], A.float(), B.float())
    assert not contract(graph)
