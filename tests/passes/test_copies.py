"""A copy is dropped only where nobody can tell: results, layouts and writes stay what they were."""

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
