"""Elements at computed places: what is raised for an index outside, when nothing is checked, and what is read."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests.loops.interpreter import capture
from tilewright import backend
from tilewright.cost.nests import nest_bytes
from tilewright.emit.triton import emit_triton
from tilewright.operators.language import Trace, Value, call, where
from tilewright.operators.ranges import CORNERS, range_of

Lookup = Callable[[Tensor, Tensor], Tensor]
LOOKUPS: dict[str, Lookup] = {
    "gather": lambda x, i: (x * 2).gather(1, i) + 1,
    "gather in a softmax": lambda x, i: (x.gather(1, i) + 1).softmax(-1),
    "embedding": lambda x, i: F.embedding(i, x) * 2,
    "index": lambda x, i: x[i] + 1,
    "index of a later dimension": lambda x, i: x.unsqueeze(0)[:, i[0], i] + 1,
    "index_select": lambda x, i: x.index_select(0, i[0]) + 1,
    "scatter of one slice": lambda x, i: x[:2].scatter(1, i[:, 1:2], 0.5) * 2,
    "a sum over rows": lambda x, i: x[i].sum((0, 1)),
    "a sum over rows and columns at the same places": lambda x, i: x[i[0]][:, i[0]].sum(),
}
PLACES = torch.tensor([[0, 6, 3], [5, 1, 1]])


def compiled(function: Lookup) -> Lookup:
    found: Lookup = torch.compile(function, backend=backend.backend, fullgraph=True, dynamic=False)
    return found


@pytest.mark.parametrize("name", LOOKUPS)
def test_an_index_outside_raises_and_the_next_call_is_right(name: str) -> None:
    """An index counts from the end where eager's does, and is refused where eager refuses it."""
    x, function = torch.randn(7, 7), LOOKUPS[name]
    run = compiled(function)
    with backend.recording() as record:
        torch.testing.assert_close(run(x, PLACES), function(x, PLACES))
    assert [step.generated for graph in record.graphs for step in graph.executable.kernels]
    for wrong in (7, 2**40, -1, -7, -8):
        places = PLACES.clone()
        places[0, 1] = wrong
        try:
            expected = function(x, places)
        except (IndexError, RuntimeError) as error:
            # The same class or one of its children, and always an IndexError.
            with pytest.raises(type(error), match="out of bounds for a dimension of size 7") as raised:
                run(x, places)
            assert raised.errisinstance(IndexError)
        else:
            torch.testing.assert_close(run(x, places), expected)
    torch.testing.assert_close(run(x, PLACES), function(x, PLACES))


def test_a_dimension_of_one_element_is_checked_too() -> None:
    run = compiled(LOOKUPS["index"])
    assert torch.equal(run(torch.ones(1, 3), PLACES * 0), torch.full((2, 3, 3), 2.0))
    with pytest.raises(IndexError, match="of size 1 "):
        run(torch.ones(1, 3), PLACES)


def test_known_places_are_not_checked() -> None:
    x, i = torch.randn(4, 8), torch.tensor([[3, 9]])
    inside: list[Lookup] = [
        lambda x, i: x.gather(1, i.clamp(0, 7).expand(4, 2)),
        lambda x, i: x[:, i.clamp(-8, 7)],
        lambda x, i: x[(i > 3).long()],
        lambda x, i: F.embedding(torch.arange(3) + 1, x),
    ]
    perhaps: list[tuple[Lookup, int]] = [
        (lambda x, i: x.gather(1, i.clamp(-1, 7).expand(4, 2)), 8),
        (lambda x, i: x[:, i.clamp(-9, 7)], 8),
        (lambda x, i: x[(i > 3).long() * 4], 4),
        (lambda x, i: F.embedding(torch.arange(3) + 2, x), 4),
    ]
    assert [capture(function, x, i).nest.checks for function in inside] == [()] * len(inside)
    assert [capture(function, x, i).nest.checks for function, _ in perhaps] == [(extent,) for _, extent in perhaps]


def test_a_kernel_for_a_gpu_stops_the_device() -> None:
    source = emit_triton(
        capture(lambda x, i: x.gather(1, i) + 1, torch.randn(4, 8), torch.zeros(4, 2, dtype=torch.int64)).nest
    )
    assert '(i_1 >= 0) & (i_1 < 8), "index out of bounds for a dimension of size 8", mask=ok)' in source


def test_elements_read_are_those_at_the_places() -> None:
    table, places = torch.randn(1000, 8), torch.zeros(5, 3, dtype=torch.int64)
    read, written = nest_bytes(capture(lambda w, i: F.embedding(i, w) * 2, table, places).lowered)
    assert (read, written) == (15 * 8 + 15 * 8 * 4, 15 * 8 * 4)
    # No more than there are, however many places.
    read, _ = nest_bytes(capture(lambda w, i: F.embedding(i, w) * 2, table[:7].clone(), places).lowered)
    assert read == 15 * 8 + 7 * 8 * 4


NUMBERS = st.integers(-40, 40)


@st.composite
def expressions(draw: st.DrawFn) -> tuple[Trace, Value, int]:
    """A whole number computed from one of 0 … 9, and what it is there."""
    trace, at = Trace(), draw(st.integers(0, 9))
    value, number = trace.arange(10), at
    for _ in range(draw(st.integers(1, 6))):
        other = draw(NUMBERS)
        match draw(st.sampled_from(["add", "sub", "mul", "minimum", "maximum", "neg", "where"])):
            case "neg":
                value, number = -value, -number
            case "where":
                value, number = where(value < other, value + other, value), number + other if number < other else number
            case name:
                value, number = call(name, value, other), CORNERS[name](number, other)
    return trace, value, number


@given(expressions())
def test_a_range_holds_what_is_computed(found: tuple[Trace, Value, int]) -> None:
    _, value, number = found
    range_ = range_of(value)
    assert range_ is not None and range_[0] <= number <= range_[1]
    assert range_of(value.to_compute("float32")) is None
