"""Biases added to products: one call, and eager's numbers at least."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import aten, calls, run
from tilewright.hardware.target import target_named
from tilewright.measure.truth.contract import compare
from tilewright.passes.added_biases import add_biases_in_products

H200 = target_named("h200")


def given(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).bfloat16()


X, W, B, TURNED = given(6, 7, 40), given(24, 40), given(24), given(6, 40, 7).mT
ADDED: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "linear": (lambda x, w, b: (x.reshape(42, 40) @ w.t()).view(6, 7, 24) + b, [TURNED, W, B]),
    "two axes": (lambda x, w, b: x @ w.t() + b, [X[0], W, B]),
    "bias first": (lambda x, w, b: b + (x.view(42, 40) @ w.t()).view(6, 7, 24), [X, W, B]),
    "read twice": (lambda x, w, b: (y := x @ w.t() + b) * torch.relu(y), [X[0], W, B]),
}
LEFT: dict[str, tuple[Callable[..., Any], list[Tensor]]] = {
    "no bias of columns": (lambda x, w, b: x[0] @ w.t() + b[:7, None], [X, W, B]),
    "columns shown as rows": (lambda x, w, b: (x.view(42, 40) @ w[:7].t()).view(7, 42) + b.sum(), [X, W, B]),
    "a transposed product": (lambda x, w, b: (x[0] @ w[:7].t()).t() + b[:7], [X, W, B]),
    "the product is read": (lambda x, w, b: (y := x[0] @ w.t()) * (y + b), [X, W, B]),
    "a wider bias": (lambda x, w, b: x[0] @ w.t() + b.float(), [X, W, B]),
    "scaled": (lambda x, w, b: torch.add(x[0] @ w.t(), b, alpha=2), [X, W, B]),
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


@pytest.mark.parametrize("name", LEFT)
def test_other_sums_stay(name: str) -> None:
    function, inputs = LEFT[name]
    graph = aten(function, *inputs)
    before = calls(graph)
    add_biases_in_products(graph, H200)
    assert calls(graph) == before


def test_on_a_cpu_nothing_changes() -> None:
    function, inputs = ADDED["linear"]
    graph = aten(function, *inputs)
    before = calls(graph)
    add_biases_in_products(graph, target_named("cpu"))
    assert calls(graph) == before
