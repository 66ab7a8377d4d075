"""Convolutions on a CPU: which graphs become channels-last, and what the gradients of their weights read."""

import copy

import pytest
import torch
from torch import nn

from tests.backend.compiling import compiled
from tilewright.backend import Recording, recording
from tilewright.measure.truth.contract import compare

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


def gradients(run: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.detach().requires_grad_()
    y = run(x)
    y.square().sum().backward()
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad for p in run.parameters() if p.grad is not None)]


def verdict(record: Recording) -> str:
    (decision,) = [d for d in record.decisions if d.passed_by == "channels_last"]
    return decision.verdict


@pytest.mark.parametrize(("window", "size"), [(7, 2), (3, 2), (5, 4), (5, 16)])
def test_results_and_gradients(window: int, size: int) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model, x = Separable(window), torch.randn(2, CHANNELS, size, size)
    eager, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    with recording() as record:
        found = gradients(compiled(model), x)
    assert verdict(record) == "taken"
    for mine, theirs, exact in zip(found, gradients(eager, x), gradients(wide, x.double()), strict=True):
        assert mine.stride() == theirs.stride() or 1 in mine.shape
        row = compare(mine, theirs, exact)
        assert row.ok, row
    backward = next(graph.plan.graph for graph in record.graphs if graph.plan.name == "backward")
    calls = [node for node in backward.nodes if node.target is torch.ops.aten.convolution_backward.default]
    depthwise = [node for node in calls if node.args[9] == CHANNELS]
    assert len(calls) == 4 and len(depthwise) == 2
    for node in depthwise:
        laid = [operand.meta["val"].is_contiguous() for operand in node.all_input_nodes[:2]]
        assert laid == [window > 3 and size < 16] * 2


def test_backward_reads_weights_and_images_as_the_caller_holds_them() -> None:
    """Forward's channels-last copies of a dense weight and of the image are not kept."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    depthwise = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, groups=CHANNELS)
    model, x = nn.Sequential(nn.Conv2d(3, CHANNELS, 4, 4), depthwise), torch.randn(2, 3, 32, 32)
    eager, wide = copy.deepcopy(model), copy.deepcopy(model).double()
    with recording() as record:
        found = gradients(compiled(model), x)
    assert verdict(record) == "taken"
    for mine, theirs, exact in zip(found, gradients(eager, x), gradients(wide, x.double()), strict=True):
        row = compare(mine, theirs, exact)
        assert row.ok, row
    backward = next(graph.plan.graph for graph in record.graphs if graph.plan.name == "backward")
    held = {node for node in backward.nodes if node.op == "placeholder" and not node.name.startswith("tangents")}
    layouts = {(*node.meta["val"].shape,): node.meta["val"].is_contiguous() for node in held}
    assert layouts[2, 3, 32, 32] and layouts[CHANNELS, 3, 4, 4]


def test_dense_convolutions_and_those_of_one_channel_keep_their_layout() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    x = torch.randn(2, 1, 8, 8)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1))
    with recording() as record:
        y = compiled(model)(x)
    assert verdict(record) == "refused"
    torch.testing.assert_close(y, model(x))
