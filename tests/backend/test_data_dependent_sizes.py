"""Sizes that depend on data: what has such a size is a call of PyTorch's, the rest of the graph is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright.backend import Recording, backend, recording


@pytest.fixture(autouse=True)
def whole_graphs() -> Iterator[None]:
    """Dynamo keeps operators whose results have such sizes in the graph."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


def places(x: Tensor) -> tuple[Tensor, Tensor]:
    return (x * 2).exp(), torch.nonzero(x > 0)


def chosen(x: Tensor) -> Tensor:
    return ((x * 2).exp()[x > 0] * 2 + 1).sum()


def routed(x: Tensor) -> Tensor:
    """As a mixture of experts sends rows to one of them."""
    rows = torch.nonzero(x.sin()[:, 0] > 0)[:, 0]
    sent = torch.nn.functional.gelu(x[rows] @ x.t()).softmax(-1)
    return x.new_zeros(7, 7).index_add(0, rows, sent).exp() + 1


def different(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.exp() * 2, torch.unique(x.long()) * 3


def counted(record: Recording) -> list[bool]:
    assert [fallback for fallback in record.fallbacks if "graph" in fallback.what] == []
    (graph,) = record.graphs
    return [step.generated for step in graph.executable.steps]


@pytest.mark.parametrize("function", [places, chosen, routed, different], ids=lambda f: f.__name__)
def test_the_rest_of_the_graph_is_compiled(function: Callable[[Tensor], Any]) -> None:
    generator = torch.Generator().manual_seed(2)
    run = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    with recording() as record:
        for shift in (0.0, 0.5, -9.0, 9.0):
            # Other counts at every call, none and all among them.
            x = torch.randn(7, 9, generator=generator) + shift
            torch.testing.assert_close(run(x), function(x))
    assert True in counted(record) and False in counted(record)


def test_gradients_are_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward would have to be compiled anew for each count."""
    monkeypatch.setenv("TILEWRIGHT_STRICT", "0")
    x = torch.randn(7, 9, requires_grad=True)
    with recording() as record:
        result = torch.compile(chosen, backend=backend, fullgraph=True)(x)
    torch.testing.assert_close(torch.autograd.grad(result, x), torch.autograd.grad(chosen(x), x))
    assert record.graphs == []
    assert "depends on the data" in record.fallbacks[0].why
