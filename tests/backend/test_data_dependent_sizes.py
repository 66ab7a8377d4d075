"""Sizes that depend on data: what has such a size is a call of PyTorch's, the rest of the graph is compiled."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright.backend import Recording, backend, recording


@pytest.fixture(autouse=True)
def whole_graphs(executor: None) -> Iterator[None]:
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


def agrees_at_each(
    function: Callable[..., Tensor],
    shifts: Sequence[float],
    *,
    rows: Sequence[int] = (7,),
    device: str = "cpu",
    **options: Any,
) -> Recording:
    """Compiled whole, `function` of [rows, 9] and its gradient are eager's at each count that a shift makes."""
    generator = torch.Generator(device).manual_seed(2)
    run = torch.compile(function, backend=backend, fullgraph=True, **{"dynamic": False, **options})
    with recording() as record:
        for count, shift in itertools.product(rows, shifts):
            x = (torch.randn(count, 9, generator=generator, device=device) + shift).requires_grad_()
            ours, theirs = run(x), function(x)
            torch.testing.assert_close(ours, theirs)
            torch.testing.assert_close(torch.autograd.grad(ours, x), torch.autograd.grad(theirs, x))
    return record


def runs_without_python(record: Recording) -> bool:
    """The executor in C++ runs all graphs, and none fell back."""
    executables = [graph.executable for graph in record.graphs]
    programs = [one.native is not None and one.native.program(one) is not None for one in executables]
    return record.fallbacks == [] and all(programs)


@pytest.mark.parametrize("function", [places, different], ids=lambda f: f.__name__)
def test_the_rest_of_the_graph_is_compiled(function: Callable[[Tensor], Any]) -> None:
    generator = torch.Generator().manual_seed(2)
    run = torch.compile(function, backend=backend, fullgraph=True, dynamic=False)
    with recording() as record:
        for shift in (0.0, 0.5, -9.0, 9.0):
            # Other counts at every call, none and all among them.
            x = torch.randn(7, 9, generator=generator) + shift
            torch.testing.assert_close(run(x), function(x))
    (graph,) = record.graphs
    assert {step.generated for step in graph.executable.steps} == {True, False}
    assert [fallback for fallback in record.fallbacks if "graph" in fallback.what] == []


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


SHIFTS = (0.0, 0.5, -0.3, -9.0, 9.0, 0.1)
"""Other counts at every call, none and all among them."""


@pytest.mark.parametrize(
    ("function", "dynamic"),
    [*((function, False) for function in TRAINED), (experts, True)],
)
def test_a_backward_is_planned_once_for_all_counts(function: Callable[[Tensor], Tensor], dynamic: bool) -> None:
    record = agrees_at_each(lambda x: function(x).sum(), SHIFTS, dynamic=dynamic)
    assert len(record.graphs) == 2 and runs_without_python(record)
    assert all(any(step.generated for step in graph.executable.steps) for graph in record.graphs)


def test_sizes_that_change_are_planned_apart_and_counts_are_not() -> None:
    """Rows whose number changes, of which a mask takes some: one plan a direction for each number of rows."""

    def function(x: Tensor) -> Tensor:
        kept = x[x[:, 0] > 0]
        return torch.nn.functional.gelu(kept @ (x.t() @ x)).square().sum() + x.cos().sum()

    record = agrees_at_each(function, (0.0, 0.4, -9.0), rows=(7, 11, 7, 11, 7), dynamic=True)
    assert record.fallbacks == [] and len(record.graphs) == 4


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_an_unused_result_of_such_a_size_depends_on_has_no_gradient(dynamic: bool) -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        kept = x[x[:, 0] > 0].log()
        return (kept * w).t(), torch.cat([kept, kept * 2]), x * 2

    run = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    w = torch.ones(9, requires_grad=True)
    for used, rows in itertools.product(((2,), (1, 2)), (7, 8)):
        x = torch.randn(rows, 9, requires_grad=True)
        ours, theirs = (
            torch.autograd.grad(sum(call(x, w)[i].sum() for i in used), (x, w), allow_unused=True)  # type: ignore[arg-type]
            for call in (run, function)
        )
        torch.testing.assert_close(ours[0], theirs[0], equal_nan=True)
        assert ours[1] is None


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
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert runs_without_python(agrees_at_each(function, (0.0, 1.0, -1.0, 9.0, 0.2)))
