"""Casts to a wider dtype and back: which are dropped, also of results."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import aten, calls, run
from tilewright.passes.casts import drop_round_trips
from tilewright.passes.simplify import drop_unread


def beside_its_source(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    return y, y.float().view(-1).bfloat16()


Function = Callable[[Tensor], tuple[Tensor, ...]]
DROPPED: dict[str, Function] = {
    "inside": lambda x: (x.sin().float().view(-1).bfloat16().cos(),),
    "result": lambda x: (x.sin().float().view(-1).bfloat16(),),
}
KEPT: dict[str, Function] = {
    "of rows with gaps": lambda x: (x[:, :5].float().view(2, 3, 5).bfloat16().cos(),),
    "of an input": lambda x: (x.float().view(-1).bfloat16(),),
    "beside its source": beside_its_source,
    "narrowed": lambda x: (x.sin().to(torch.float8_e5m2).bfloat16().cos(),),
    "closing gaps": lambda x: (x.sin()[:, :5].float().view(-1).bfloat16().cos(),),
}


@pytest.mark.parametrize("name", [*DROPPED, *KEPT])
def test_round_trips(name: str) -> None:
    function, x = (DROPPED | KEPT)[name], torch.randn(6, 8, dtype=torch.bfloat16)
    graph = aten(function, x)
    drop_round_trips(graph)
    drop_unread(graph)
    assert any("_to_copy" in call for call in calls(graph)) == (name in KEPT)
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
