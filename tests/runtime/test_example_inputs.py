"""Inputs made up to time a graph: a kernel that draws again finds its place in memory by the state that it is given."""

import pytest
import torch
from torch import fx

from tilewright.passes.draws import BLOCK, SHAPE, keep
from tilewright.runtime.stopwatch import example_inputs


@pytest.mark.parametrize("size", [[1], [7, 9], [512, 2048]], ids=str)
def test_the_state_of_a_draw_has_a_row_for_every_number(size: list[int]) -> None:
    graph = fx.Graph()
    stream, other = graph.placeholder("stream"), graph.placeholder("other")
    stream.meta["val"] = other.meta["val"] = torch.empty(SHAPE, dtype=torch.int32)
    graph.output(graph.call_function(keep, (stream, size, list(range(len(size))), 0.9)))
    made, _ = example_inputs(graph)
    begin, spacing = int(made[0, -1]), int(made[1, -1])
    last = begin + 2 * torch.Size(size).numel() - 1
    assert 0 <= begin < BLOCK and spacing > 0 and last // BLOCK // spacing < SHAPE[0]
