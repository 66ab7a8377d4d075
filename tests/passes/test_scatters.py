"""Gradients of gathers: which become tilewright's sums, and their numbers."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import aten, calls, run
from tilewright.hardware.profiles import profile_for
from tilewright.hardware.target import Target
from tilewright.passes.scatters import sum_scattered

H200, CPU = Target(profile_for("h200"), False), Target(profile_for("cpu"), True)


def gradient(dy: Tensor, index: Tensor) -> Tensor:
    return dy.new_zeros(4, 3, 9).scatter_add(2, index.expand(4, 3, 5), dy)


def test_zeros_and_the_scatter_become_one_call() -> None:
    dy, index = torch.randn(4, 3, 5), torch.randint(0, 9, (3, 5))
    graph = aten(gradient, dy, index)
    assert [d.verdict for d in sum_scattered(graph, CPU)] == []
    (decision,) = sum_scattered(graph, H200)
    assert (decision.verdict, decision.graph, decision.passed_by) == ("taken", "forward", "scatters")
    assert calls(graph) == ["expand.default", "tilewright.scatter_sums.default"]
    torch.testing.assert_close(run(graph, dy, index), gradient(dy, index))


def test_what_stays() -> None:
    dy, index = torch.randn(4, 5), torch.randint(0, 4, (4, 5))
    others = {
        "does not run along the last dimension": lambda dy, i: dy.new_zeros(4, 5).scatter_add(0, i, dy),
        "does not cover all rows": lambda dy, i: dy.new_zeros(6, 5).scatter_add(1, i, dy),
        "is not for torch.float64": lambda dy, i: dy.double().new_zeros(4, 5).scatter_add(1, i, dy.double()),
        "longer than 4096": lambda dy, i: dy.new_zeros(4, 4097).scatter_add(1, i, dy),
    }
    for reason, function in others.items():
        graph = aten(function, dy, index)
        (decision,) = sum_scattered(graph, H200)
        assert decision.verdict == "refused" and reason in decision.reason
        assert "scatter_add.default" in calls(graph)
    for function in (lambda dy, i: dy.scatter_add(1, i, dy), lambda dy, i: torch.ones_like(dy).scatter_add(1, i, dy)):
        assert sum_scattered(aten(function, dy, index), H200) == []


@pytest.mark.parametrize("zeros", [torch.zeros_like, lambda x: torch.full_like(x, 0), lambda x: torch.zeros(4, 5)])
def test_zeros_by_any_name(zeros: object) -> None:
    graph = aten(lambda dy, i: zeros(dy).scatter_add(-1, i, dy), torch.randn(4, 5), torch.randint(0, 4, (4, 5)))  # type: ignore[operator]
    assert [d.verdict for d in sum_scattered(graph, H200)] == ["taken"]
