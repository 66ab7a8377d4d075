"""Sizes that depend on data: what has such a size is a call of PyTorch's, the rest of the graph is compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright.backend import Recording, backend, recording
from tilewright.launch.executor import EXTENSION


@pytest.fixture(autouse=True)
def whole_graphs() -> Iterator[None]:
    """Dynamo keeps operators whose results have such sizes in the graph; the executor in C++ is built."""
    EXTENSION.module()
    assert EXTENSION.wait()
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


def in_part(x: Tensor) -> Tensor:
    """Values at a mask are replaced by what is computed of them."""
    positive = x > 0
    return (torch.index_put(x.exp() * 2, (positive,), x[positive] * 3).sigmoid() * x).sum()


def parted(x: Tensor) -> Tensor:
    low = x[:, 0] <= 0
    return torch.cat([x[~low].exp(), x[low].sin()]).mul(2).square().sum()


def normalised(x: Tensor) -> Tensor:
    return torch.nn.functional.layer_norm(x[x[:, 0] > 0], (9,)).square().sum() + x.cos().sum()


def picked(x: Tensor) -> Tensor:
    """The loss of the rows that count, as with an index to ignore."""
    counts = x[:, 0] > 0
    return torch.nn.functional.cross_entropy(x[counts] * 2, torch.arange(7, device=x.device)[counts], reduction="sum")


def selected(x: Tensor) -> Tensor:
    return torch.masked_select(x.exp(), x > 0.2).square().sum() + x.tanh().sum()


def experts(x: Tensor) -> Tensor:
    """A mixture of three experts: each takes the rows that are sent to it."""
    gates = x[:, :3].softmax(-1)
    best, out = gates.argmax(-1), torch.zeros_like(x)
    for number in range(3):
        rows = torch.nonzero(best == number)[:, 0]
        sent = torch.nn.functional.silu(x[rows] @ (x.t() @ x))
        out = out.index_add(0, rows, sent * gates[rows, number, None])
    return out.tanh().sum()


TRAINED = [chosen, routed, in_part, parted, normalised, picked, selected, experts]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", TRAINED, ids=lambda f: f.__name__)
def test_a_backward_is_planned_once_for_all_counts(function: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    run = torch.compile(lambda x: function(x).sum(), backend=backend, fullgraph=True, dynamic=dynamic)
    with recording() as record:
        for shift in (0.0, 0.5, -0.3, -9.0, 9.0, 0.1):
            x = (torch.randn(7, 9, generator=generator) + shift).requires_grad_()
            ours, theirs = run(x), function(x).sum()
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(theirs, x))
    assert record.fallbacks == []
    forward, backward = record.graphs
    # The executor in C++ ran the later calls.
    for graph in record.graphs:
        assert graph.executable.native is not None and graph.executable.native.program(graph.executable) is not None
    assert any(step.generated for step in forward.executable.steps)
    assert any(step.generated for step in backward.executable.steps)


def test_sizes_that_change_are_planned_apart_and_counts_are_not() -> None:
    """Rows whose number changes, of which a mask takes some: one plan a direction for each number of rows."""

    def function(x: Tensor) -> Tensor:
        kept = x[x[:, 0] > 0]
        return torch.nn.functional.gelu(kept @ (x.t() @ x)).square().sum() + x.cos().sum()

    generator = torch.Generator().manual_seed(2)
    run = torch.compile(function, backend=backend, fullgraph=True, dynamic=True)
    with recording() as record:
        for rows in (7, 11, 7, 11, 7):
            for shift in (0.0, 0.4, -9.0):
                x = (torch.randn(rows, 9, generator=generator) + shift).requires_grad_()
                ours, theirs = run(x), function(x)
                torch.testing.assert_close(ours, theirs)
                torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(theirs, x))
    assert record.fallbacks == []
    assert len(record.graphs) == 4


def scaled(x: Tensor) -> Tensor:
    """A number that is read from data, in place of a tensor."""
    return (x.exp() * x.mean().item()).tanh().sum()


def counted_positive(x: Tensor) -> Tensor:
    count = int((x[:, 0] > 0).sum().item())
    return x.exp()[:3].sum() * count + count


def judged(x: Tensor) -> Tensor:
    return (x.cos() * bool((x > 0).all().item())).sum()


def cut(x: Tensor) -> Tensor:
    count = int((x[:, 0] > 0).sum().item())
    torch._check(count <= 7)
    return x.exp()[:count].sum() + torch.ones(count, 3).sum()


@pytest.mark.parametrize("function", [scaled, counted_positive, judged, cut], ids=lambda f: f.__name__)
def test_numbers_read_from_data_are_values_of_the_program(function: Callable[[Tensor], Tensor]) -> None:
    generator = torch.Generator().manual_seed(2)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), recording() as record:
        run = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
        for shift in (0.0, 1.0, -1.0, 9.0, 0.2):
            x = (torch.randn(7, 9, generator=generator) + shift).requires_grad_()
            ours, theirs = run(x), function(x)
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(theirs, x))
    assert record.fallbacks == []
    for graph in record.graphs:
        assert graph.executable.native is not None and graph.executable.native.program(graph.executable) is not None
