"""What PyTorch's trees of CUDA graphs are asked and told, with stand-ins for them: without a GPU."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._inductor import config, cudagraph_trees

from tilewright.graph.capture import CallableGraph
from tilewright.graph.cuda_graph import end_forward, recorded, written_inputs


def graph_with_everything() -> CallableGraph:
    """Two inputs, of which the first is written to, a tensor of its own, two results and a None."""
    root = torch.nn.Module()
    root.register_buffer("table", torch.ones(3))
    graph = fx.Graph()
    written, x = graph.placeholder("written"), graph.placeholder("x")
    table = graph.get_attr("table")
    total = graph.call_function(torch.ops.aten.add.Tensor, (x, table))
    back = graph.call_function(torch.ops.aten.copy_.default, (written, total))
    for node in (written, x, table, total, back):
        node.meta["val"] = torch.empty(3)
    total.stack_trace = "model.py, line 3"
    graph.output((total, None, back))
    return CallableGraph(fx.GraphModule(root, graph), "forward", (0,))


def test_a_recording_is_told_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[dict[str, Any]] = []
    warm_up_skipped: list[bool] = []
    manager = SimpleNamespace(warmed_up_functions={1}, ids_to_funcs={1: "first", 2: "this"})

    def trees(model: Any, inputs: list[Any], static: Sequence[int], **more: Any) -> Any:
        # The real ones take these names.
        inspect.signature(cudagraph_trees.cudagraphify).bind(model, inputs, static, **more)
        told.append(more | {"model": model, "inputs": list(inputs), "static": static})

        def replay(args: list[Any]) -> Sequence[Any]:
            warm_up_skipped.append(config.triton.skip_cudagraph_warmup)
            results: Sequence[Any] = model(args)
            return results

        return replay

    def run(args: list[Any]) -> Sequence[Any]:
        args.clear()
        return ["results"]

    monkeypatch.setattr(cudagraph_trees, "cudagraphify_impl", trees)
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda device: manager)
    graph = graph_with_everything()
    a, b = torch.zeros(3), torch.ones(3)
    args: list[Any] = [a, b]
    replay, first = recorded(run, graph, 1, args)
    assert first == ["results"] and args == []
    assert replay([a, b]) == ["results"]
    assert warm_up_skipped == [True, False]
    assert manager.warmed_up_functions == {1, 2}
    (about,) = told
    assert about["model"] is run and about["static"] == (0,) and about["device_index"] == 1
    assert (about["is_backward"], about["is_inference"]) == (False, False)
    assert about["stack_traces"] == ["model.py, line 3", None, None]
    assert about["constants"] == (graph.module.table,)
    assert [p.name for p in about["placeholders"]] == ["written", "x"]
    assert about["mutated_input_idxs"] == (0,)


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


def test_the_end_of_a_forward_needs_trees(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[str] = []
    manager = SimpleNamespace(set_to_running_backward=lambda: heard.append("backward"))
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda device, create_if_none_exists: None)
    end_forward(0)
    assert heard == []
    monkeypatch.setattr(cudagraph_trees, "get_manager", lambda device, create_if_none_exists: manager)
    end_forward(0)
    assert heard == ["backward"]
