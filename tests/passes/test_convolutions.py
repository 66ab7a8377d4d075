"""Convolutions: which graphs become channels-last on a CPU, what gradients of weights read, who adds the bias."""

import copy

import pytest
import torch
from torch import fx, nn

from tests.backend.compiling import compiled
from tests.contract import keeps_contract
from tests.gpu.kernels.launching import in_turn
from tests.passes.test_channels_last import trains_as_eager
from tilewright.backend import Recording, recording
from tilewright.compile.stages import rewrite
from tilewright.hardware.target import target_named
from tilewright.passes.convolution.other_forms import split_bias

CHANNELS = 24


class Separable(nn.Module):
    """A depthwise convolution and one of 1 × 1, twice, with norms."""

    def __init__(self, window: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(
                layer
                for _ in range(2)
                for layer in (
                    nn.Conv2d(CHANNELS, CHANNELS, window, padding=window // 2, groups=CHANNELS, bias=False),
                    nn.BatchNorm2d(CHANNELS),
                    nn.Conv2d(CHANNELS, CHANNELS, 1),
                    nn.SiLU(),
                )
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)  # type: ignore[no-any-return]


def verdict(record: Recording) -> str:
    (decision,) = [d for d in record.decisions if d.passed_by == "channels_last"]
    return decision.verdict


@pytest.mark.parametrize(("window", "size"), [(7, 2), (3, 2), (5, 4), (5, 16)])
def test_results_and_gradients(window: int, size: int) -> None:
    # Of two small images a bias' gradient is 24 sums of 8 numbers, and eager's error, the measure of ours, is chance.
    images = max(2, 64 // size**2)
    model, x = Separable(window), torch.randn(images, CHANNELS, size, size)
    record = trains_as_eager(model, x)
    assert verdict(record) == "taken"
    backward = next(graph.plan.graph for graph in record.graphs if graph.plan.name == "backward")
    calls = [node for node in backward.nodes if node.target is torch.ops.aten.convolution_backward.default]
    depthwise = [node for node in calls if node.args[9] == CHANNELS]
    assert len(calls) == 4 and len(depthwise) == 2
    for node in depthwise:
        laid = [operand.meta["val"].is_contiguous() for operand in node.all_input_nodes[:2]]
        assert laid == [False, False]


def test_backward_reads_weights_and_images_as_the_caller_holds_them() -> None:
    """Forward's channels-last copies of a dense weight and of the image are not kept."""
    depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
    model, x = nn.Sequential(nn.Conv2d(3, CHANNELS, 4, 4), depthwise), torch.randn(2, 3, 32, 32)
    record = trains_as_eager(model, x)
    assert verdict(record) == "taken"
    backward = next(graph.plan.graph for graph in record.graphs if graph.plan.name == "backward")
    held = {node for node in backward.nodes if node.op == "placeholder" and not node.name.startswith("tangents")}
    layouts = {(*node.meta["val"].shape,): node.meta["val"].is_contiguous() for node in held}
    assert layouts[2, 3, 32, 32] and layouts[CHANNELS, 3, 4, 4]


def test_the_gradient_of_an_image_with_gaps_lies_as_in_eager() -> None:
    wide = torch.randn(2, 2 * CHANNELS, 8, 8)
    images = [wide[:, ::2], wide[:, :CHANNELS].permute(2, 1, 0, 3), wide.to(memory_format=torch.channels_last)[:, ::2]]
    for image in images:
        model, leaf = Separable(3), image.detach().requires_grad_()
        expected, found = (torch.autograd.grad(one(leaf).sum(), leaf)[0] for one in (model, compiled(model)))
        assert found.stride() == expected.stride()
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_dense_convolutions_and_those_of_one_channel_keep_their_layout() -> None:
    x = torch.randn(2, 1, 8, 8)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    with recording() as record:
        y = compiled(model)(x)
    assert verdict(record) == "refused"
    torch.testing.assert_close(y, model(x))


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


@pytest.mark.parametrize(("name", "dtype"), in_turn(CASES, [(torch.float32, torch.bfloat16)]), ids=str)
def test_outputs_and_gradients_keep_the_contract(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrite("split_bias"), "run", lambda graph, target: split_bias(graph, H200))
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
