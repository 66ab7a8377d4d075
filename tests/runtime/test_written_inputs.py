"""Inputs that a graph writes to: a recording must know where they lie."""

import torch
from torch import fx

from tilewright.graph.cuda_graph import written_inputs


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
