"""Biases of convolutions beside them: added by the kernel that reads the result, summed by the one that makes g."""

import copy

import pytest
import torch
from torch import fx, nn

from tests.contract import keeps_contract
from tilewright.compile import planner
from tilewright.hardware.target import target_named
from tilewright.passes.convolution_bias import split_bias

H200, CPU = target_named("h200"), target_named("cpu")
CASES: dict[str, tuple[nn.Module, tuple[int, ...]]] = {
    "2d": (nn.Conv2d(5, 7, 3), (2, 5, 9, 8)),
    "1d": (nn.Conv1d(5, 7, 3, padding=1), (2, 5, 9)),
    "transposed": (nn.ConvTranspose2d(5, 7, 2, 2), (2, 5, 4, 6)),
    "groups": (nn.Conv2d(4, 8, 3, groups=4), (2, 4, 9, 8)),
    "bias alone has a gradient": (nn.Conv2d(5, 7, 3), (2, 5, 9, 8)),
    "no bias": (nn.Conv2d(5, 7, 3, bias=False), (2, 5, 9, 8)),
}


def arguments(graph: fx.Graph, name: str) -> list[tuple[object, ...]]:
    return [node.args for node in graph.nodes if str(node.target) == f"aten.{name}.default"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_outputs_and_gradients_keep_the_contract(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planner, "split_bias", lambda graph, target: split_bias(graph, H200))
    torch.manual_seed(0)
    model, shape = copy.deepcopy(CASES[name][0]).to(dtype), CASES[name][1]
    alone = name == "bias alone has a gradient"
    model.weight.requires_grad_(not alone)
    record = keeps_contract(nn.Sequential(model, nn.GELU()), [torch.randn(shape).to(dtype).requires_grad_(not alone)])
    forward, backward = (graph.plan.graph for graph in record.graphs)
    assert [args[2] for args in arguments(forward, "convolution")] == [None]
    assert [args[10][2] for args in arguments(backward, "convolution_backward")] == ([] if alone else [False])  # type: ignore[index]


def test_a_cpu_adds_the_bias_in_the_convolution() -> None:
    graph = fx.Graph()
    assert not CPU.is_gpu
    x, w, b = (graph.placeholder(name) for name in "xwb")
    call = graph.call_function(torch.ops.aten.convolution.default, (x, w, b, [1], [0], [1], False, [0], 1))
    graph.output(call)
    split_bias(graph, CPU)
    assert call.args[2] is b
