"""A copy is dropped only where nobody can tell: results, layouts and writes stay what they were."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import aten, calls, run
from tilewright.passes.copies import drop_copies

X = torch.linspace(-2, 2, 12).reshape(3, 4)


def copies(function: Callable[..., Any], *inputs: Tensor) -> int:
    """How many copies are left, after a check that results and inputs end as they do in eager."""
    graph = aten(function, *inputs)
    drop_copies(graph)
    ours, theirs = [t.clone() for t in inputs], [t.clone() for t in inputs]
    torch.testing.assert_close(run(graph, *ours), function(*theirs), rtol=0, atol=0)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    return calls(graph).count("clone.default")


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.exp().clone().sin(),
        lambda x: (e := x.exp()).clone() @ e.t(),
        lambda x: x.exp().t().clone().t().sin(),
        lambda x: x.exp().clone().clone().clone().sum(),
    ],
)
def test_a_copy_inside_is_needless(program: Callable[[Tensor], Tensor]) -> None:
    assert copies(program, X) == 0


@pytest.mark.parametrize(
    "program",
    [
        lambda x: x.clone(),
        lambda x: x.exp().clone(),
        lambda x: x.clone().t(),
        lambda x: x.clone().split(2, 1)[0],
        lambda x: x.exp().t().clone().detach()[:1],
    ],
)
def test_a_result_of_its_own_stays(program: Callable[[Tensor], Tensor]) -> None:
    assert copies(program, X) == 1


@pytest.mark.parametrize("program", [lambda x: (x.clone().sin(), x), lambda x: ((e := x.exp()), e.clone().sin())])
def test_a_copy_of_what_a_caller_holds_stays(program: Callable[[Tensor], Any]) -> None:
    # The caller may write to the original before backward looks at the copy.
    assert copies(program, X) == 1


def test_a_copy_with_another_layout_stays() -> None:
    assert copies(lambda x: x.exp().t().clone(memory_format=torch.contiguous_format).sin(), X) == 1


@pytest.mark.parametrize(("begin", "left"), [(1, 1), (4, 0)])
def test_a_copy_that_begins_at_a_multiple_of_16_bytes_stays(begin: int, left: int) -> None:
    assert copies(lambda x: x.exp().flatten()[begin:].clone().sin(), X) == left


def test_a_copy_of_what_is_written_later_stays() -> None:
    def program(x: Tensor) -> Tensor:
        e = x.exp()
        before = e.clone()
        e.t().add_(1)
        return before * 2 + e

    assert copies(program, X) == 1


def test_a_copy_that_is_written_stays() -> None:
    assert copies(lambda x: (e := x.exp()).clone().mul_(2) + e, X) == 1
