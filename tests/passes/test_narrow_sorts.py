"""Sorts of places that `topk` gives: their keys are narrow on a GPU, and the results those of wide ones."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import aten, run
from tilewright.hardware.profiles import profile_for
from tilewright.hardware.target import Target
from tilewright.passes.narrow_sorts import narrow_sorts

H200 = Target(profile_for("h200"), False)


def by_expert(scores: Tensor) -> Any:
    return scores.topk(2, -1)[1].reshape(-1).sort(stable=True)


def of_columns(scores: Tensor) -> Any:
    return scores.topk(2, 0)[1].flatten().sort(descending=True, stable=True)


def keys_of(graph: torch.fx.Graph) -> list[torch.dtype]:
    return [node.args[0].meta["val"].dtype for node in graph.nodes if "sort" in str(node.target)]


@pytest.mark.parametrize(
    ("function", "shape", "dtype"),
    [
        (by_expert, (30, 8), torch.int8),
        (by_expert, (30, 128), torch.int8),
        (by_expert, (30, 129), torch.int16),
        (of_columns, (129, 8), torch.int16),
        (by_expert, (3, 2**15 + 1), torch.int64),
    ],
)
def test_keys_are_as_narrow_as_the_largest(
    function: Callable[[Tensor], Any], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(0))
    graph = aten(function, scores)
    decisions = narrow_sorts(graph, H200)
    assert keys_of(graph) == [dtype] and len(decisions) == (dtype != torch.int64)
    for ours, eager in zip(run(graph, scores), function(scores), strict=True):
        assert torch.equal(ours, eager) and ours.dtype == eager.dtype == torch.int64


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "of values": lambda x: x.topk(2)[0].flatten().sort()[1],
    "of places": lambda x: x.to(torch.int64).flatten().sort()[1],
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_keys_stay(name: str) -> None:
    graph = aten(OTHERS[name], torch.rand(6, 8))
    before = keys_of(graph)
    assert narrow_sorts(graph, H200) == [] and keys_of(graph) == before


def test_a_cpu_sorts_wide_keys() -> None:
    graph = aten(by_expert, torch.rand(6, 8))
    assert narrow_sorts(graph, Target(profile_for("cpu"), False)) == [] and keys_of(graph) == [torch.int64]
