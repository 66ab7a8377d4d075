"""Inputs that a graph writes to, which a recording must place, and inputs made up to time a graph."""

import pytest
import torch
from torch import fx

from tilewright.capture.cuda_graph import written_inputs
from tilewright.passes.random.draws import BLOCK, SHAPE, keep
from tilewright.runtime.stopwatch import example_inputs


def test_written_inputs_are_found_in_lists() -> None:
    graph = fx.Graph()
    x, y, z = (graph.placeholder(name) for name in "xyz")
    graph.call_function(torch.ops.aten._foreach_copy_.default, ([z, x], [y, y]))
    graph.output((y,))
    assert written_inputs(fx.GraphModule({}, graph)) == {0, 2}


def test_written_inputs_are_found_through_views() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    part = graph.call_function(torch.ops.aten.select.int, (x, 0, 1))
    graph.output((graph.call_function(torch.ops.aten.copy_.default, (part, 1.0)),))
    x.meta["val"] = torch.empty(2, 3)
    part.meta["val"] = x.meta["val"][1]
    assert written_inputs(fx.GraphModule({}, graph)) == {0}


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
