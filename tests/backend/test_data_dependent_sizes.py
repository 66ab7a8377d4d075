"""Sizes that depend on data: what has such a size is a call of PyTorch's, the rest of the graph is compiled."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.tables import functions
from tilewright.backend import Recording, backend, recording


@pytest.fixture(autouse=True)
def whole_graphs(executor: None) -> Iterator[None]:
    """Dynamo keeps operators whose results have such sizes in the graph."""
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        yield


TABLE = Path(__file__).with_name("data_dependent_sizes.txt")
RESULTS, TRAINED, NUMBERS = (functions(TABLE, section) for section in ("results", "trained", "numbers"))


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


@pytest.mark.parametrize("name", RESULTS)
def test_the_rest_of_the_graph_is_compiled(name: str) -> None:
    function = RESULTS[name]
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


SHIFTS = (0.0, 0.5, -0.3, -9.0, 9.0, 0.1)
"""Other counts at every call, none and all among them."""


@pytest.mark.parametrize(("name", "dynamic"), [*((name, False) for name in TRAINED), ("experts", True)])
def test_a_backward_is_planned_once_for_all_counts(name: str, dynamic: bool) -> None:
    function = TRAINED[name]
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


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_read_from_data_are_values_of_the_program(name: str) -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert runs_without_python(agrees_at_each(NUMBERS[name], (0.0, 1.0, -1.0, 9.0, 0.2)))
