"""Biases of convolutions beside them: added by the kernel that reads the result, summed by the one that makes g."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tilewright.backend import backend, recording
from tilewright.compile import planner
from tilewright.hardware.target import target_named
from tilewright.measure.truth.contract import compare
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
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, shape = copy.deepcopy(CASES[name][0]), CASES[name][1]
    model.reset_parameters()
    model = model.to(dtype)
    alone = name == "bias alone has a gradient"
    if alone:
        model.weight.requires_grad_(False)
    mine, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    x = torch.randn(shape).to(dtype)

    def run(layer: nn.Module, x: Tensor) -> list[Tensor]:
        x = x.detach().clone().requires_grad_(not alone)
        y = torch.compile(lambda x: F.gelu(layer(x)), backend=backend)(x) if layer is mine else F.gelu(layer(x))
        y.sum().backward()
        found = [y.detach(), *(p.grad for p in layer.parameters() if p.grad is not None)]
        return found if alone else [*found, x.grad]  # type: ignore[list-item]

    with recording() as record:
        ours = run(mine, x)
    for number, (a, b, c) in enumerate(zip(ours, run(model, x), run(exact, x.double()), strict=True)):
        figures = compare(a, b, c, tensor=str(number))
        assert figures.ok, figures
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
