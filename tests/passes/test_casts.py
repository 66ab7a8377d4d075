"""Casts to a wider dtype and back: which are dropped, also of results."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import aten, calls, run
from tilewright.passes.casts import drop_round_trips
from tilewright.passes.simplify import drop_unread


def inside(x: Tensor) -> tuple[Tensor, ...]:
    return (x.sin().float().view(-1).bfloat16().cos(),)


def result(x: Tensor) -> tuple[Tensor, ...]:
    return (x.sin().float().view(-1).bfloat16(),)


def of_rows_with_gaps(x: Tensor) -> tuple[Tensor, ...]:
    return (x[:, :5].float().view(2, 3, 5).bfloat16().cos(),)


def of_an_input(x: Tensor) -> tuple[Tensor, ...]:
    return (x.float().view(-1).bfloat16(),)


def beside_its_source(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    return y, y.float().view(-1).bfloat16()


def narrowed(x: Tensor) -> tuple[Tensor, ...]:
    return (x.sin().to(torch.float8_e5m2).bfloat16().cos(),)


def closing_gaps(x: Tensor) -> tuple[Tensor, ...]:
    return (x.sin()[:, :5].float().view(-1).bfloat16().cos(),)


DROPPED, KEPT = (inside, result), (of_rows_with_gaps, of_an_input, beside_its_source, narrowed, closing_gaps)


@pytest.mark.parametrize("function", DROPPED + KEPT)
def test_round_trips(function: Callable[[Tensor], tuple[Tensor, ...]]) -> None:
    x = torch.randn(6, 8, dtype=torch.bfloat16)
    graph = aten(function, x)
    drop_round_trips(graph)
    drop_unread(graph)
    assert any("_to_copy" in call for call in calls(graph)) == (function in KEPT)
    for ours, theirs in zip(run(graph, x), function(x), strict=True):
        assert torch.equal(ours, theirs) and ours.stride() == theirs.stride()


@pytest.mark.parametrize("of_gradient", [False, True])
def test_in_training_only_a_gradient_may_be_what_the_graph_made(of_gradient: bool) -> None:
    def function(dy: Tensor, x: Tensor) -> tuple[Tensor, ...]:
        return (dy.cos(), (dy * x if of_gradient else x.sin()).float().view(-1).bfloat16())

    x = torch.randn(6, 8, dtype=torch.bfloat16)
    graph = aten(function, x.clone(), x)
    next(iter(graph.nodes)).target = "tangents_1"
    drop_round_trips(graph)
    drop_unread(graph)
    assert any("_to_copy" in call for call in calls(graph)) == (not of_gradient)
