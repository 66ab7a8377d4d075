"""Channels-last convolutions: which graphs take the layout, and that results and strides stay eager's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilewright.backend import backend, recording
from tilewright.graph import calls
from tilewright.hardware.target import target_named
from tilewright.measure.truth.contract import compare
from tilewright.passes import pipeline
from tilewright.passes.channels_last import channels_last
from tilewright.records.program import Decision

H200 = target_named("h200")


class Block(nn.Module):
    """A residual block with a norm of kept statistics, a pooling and a view of what it pools."""

    def __init__(self, channels: int, groups: int = 1) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, groups=groups, bias=False)
        self.second = nn.Conv2d(channels, channels, 1)
        self.norm = nn.BatchNorm2d(channels).eval()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = torch.relu(self.norm(self.first(x)))
        y = nn.functional.max_pool2d(self.second(y) + x, 2)
        return y, y.view(x.shape[0], -1).sum(-1)


@pytest.fixture
def planned_for_h200(monkeypatch: pytest.MonkeyPatch) -> list[Decision]:
    """The backend on a CPU with the layout of an H200; gives what was decided."""
    decided: list[Decision] = []

    def run(module: torch.fx.GraphModule, target: Any) -> list[Decision]:
        decided.extend(channels_last(module, H200))
        return []

    monkeypatch.setattr(pipeline, "channels_last", run)
    torch._dynamo.reset()
    return decided


def wide_strides(x: Tensor) -> list[int]:
    """Strides of the axes that have more than one place."""
    return [stride for size, stride in zip(x.shape, x.stride(), strict=True) if size > 1]


def convolutions(record: Any) -> list[Tensor]:
    """Results of the compiled graphs' convolutions."""
    return [
        node.meta["val"]
        for graph in record.graphs
        for node in graph.plan.graph.nodes
        if node.target is torch.ops.aten.convolution.default
    ]


def stored(graph: Any) -> list[torch.fx.Node]:
    """What the kernels of a compiled graph write, but for copies, and what its library calls give."""
    written = [node for region in graph.plan.fusion.regions for node in region.lowered.outputs]
    library = [node for node in graph.plan.units if isinstance(node, torch.fx.Node) and not calls.is_view(node)]
    return [node for node in written + library if node.op == "call_function" and "clone" not in str(node.target)]


def test_results_gradients_and_strides_are_eagers(planned_for_h200: list[Decision]) -> None:
    torch.manual_seed(0)
    model = Block(32).bfloat16()
    mine, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    x = torch.randn(2, 32, 8, 10).bfloat16()
    with recording() as record:
        call = torch.compile(mine, backend=backend)
        got = call(x)
        sum(y.float().sum() for y in got).backward()
    wanted, true = model(x), exact(x.double())
    sum(y.float().sum() for y in wanted).backward()
    sum(y.sum() for y in true).backward()
    assert [(d.verdict, d.reason) for d in planned_for_h200] == [("taken", "2 convolutions share the layout")]
    assert all(y.is_contiguous(memory_format=torch.channels_last) for y in convolutions(record))
    for y, eager, reference in zip(got, wanted, true, strict=True):
        assert y.stride() == eager.stride() and y.dtype == eager.dtype
        assert (y.double() - reference).norm() <= 2 * (eager.double() - reference).norm() + 1e-2 * reference.norm()
    for ours, theirs in zip(mine.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        assert wide_strides(ours.grad) == wide_strides(theirs.grad)
        torch.testing.assert_close(ours.grad.float(), theirs.grad.float(), rtol=0.05, atol=0.25)


@pytest.mark.parametrize(
    "model, dtype, why",
    [
        (Block(32, groups=32), torch.bfloat16, None),
        (nn.Sequential(nn.Conv2d(3, 64, 16, stride=16)), torch.bfloat16, "fewer than 16 input channels"),
        (Block(32), torch.float32, None),
    ],
)
def test_what_stays_as_it_is(
    model: nn.Module, dtype: torch.dtype, why: str | None, planned_for_h200: list[Decision]
) -> None:
    channels = next(m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d))
    x = torch.randn(1, channels, 32, 32, dtype=dtype)
    model = model.to(dtype).eval()
    with torch.no_grad(), recording() as record:
        got = torch.compile(model, backend=backend)(x)
    if dtype == torch.float32:
        assert not planned_for_h200
    elif why is None:
        assert planned_for_h200[0].verdict == "taken"
        return
    else:
        assert planned_for_h200[0].verdict == "refused" and why in planned_for_h200[0].reason
    assert all(y.is_contiguous() for y in convolutions(record))
    torch.testing.assert_close(got, model(x), rtol=2e-2, atol=2e-2)


def test_a_result_with_strides_of_its_own_keeps_the_layout(planned_for_h200: list[Decision]) -> None:
    convolution = nn.Conv2d(16, 16, 3).bfloat16()
    x = torch.randn(1, 16, 8, 8).bfloat16()
    with torch.no_grad():
        got = torch.compile(lambda x: convolution(x).permute(0, 2, 3, 1), backend=backend)(x)
        assert got.stride() == convolution(x).permute(0, 2, 3, 1).stride()
    assert planned_for_h200[0].reason == "a result is not contiguous"


def test_statistics_of_samples_keep_the_layout(planned_for_h200: list[Decision]) -> None:
    model = nn.Sequential(nn.Conv2d(32, 32, 3), nn.InstanceNorm2d(32)).bfloat16()
    got = torch.compile(model, backend=backend)(torch.randn(2, 32, 8, 8).bfloat16())
    assert got.is_contiguous() and "reduces over places" in planned_for_h200[0].reason


class Classifier(nn.Module):
    """Two residual blocks whose batch norms take the moments of the batch, in place as torchvision's do."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, n, padding=n // 2) for n in (3, 1, 3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3))
        self.head = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = norm(convolution(x))
            y += x
            x = nn.functional.relu(y, inplace=True)
        x = nn.functional.max_pool2d(x, 3, 2, 1)
        pooled: Tensor = self.head(nn.functional.adaptive_avg_pool2d(x, 1).flatten(1))
        return pooled


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_training_keeps_the_layout_forward_and_backward(
    layout: torch.memory_format, planned_for_h200: list[Decision]
) -> None:
    """No value of four dimensions lies otherwise, and no batch norm is left whole."""
    torch.manual_seed(1)
    model = Classifier(32).bfloat16().to(memory_format=layout)
    mine, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    x = torch.randn(8, 32, 14, 14).bfloat16().contiguous(memory_format=layout).requires_grad_()
    mine_x, exact_x = x.detach().clone().requires_grad_(), x.detach().double().requires_grad_()
    with recording() as record:
        got = torch.compile(mine, backend=backend, fullgraph=True)(mine_x)
        got.float().square().sum().backward()
    model(x).float().square().sum().backward()
    exact(exact_x).square().sum().backward()
    assert planned_for_h200[0].verdict == "taken"
    for graph in record.graphs:
        assert not [node for node in graph.plan.graph.nodes if "batch_norm" in str(node.target)]
        for node in stored(graph):
            for value in calls.outputs(node):
                if value is not None and value.dim() == 4 and value.shape[1] == 32:
                    assert value.is_contiguous(memory_format=torch.channels_last), node
    named = [("x", mine_x, x, exact_x)]
    pairs = zip(mine.named_parameters(), model.parameters(), exact.parameters(), strict=True)
    named += [(name, ours, theirs, true) for (name, ours), theirs, true in pairs]
    for name, ours, theirs, true in named:
        assert ours.grad is not None and theirs.grad is not None and true.grad is not None
        assert wide_strides(ours.grad) == wide_strides(theirs.grad), name
        figures = compare(ours.grad, theirs.grad, true.grad, tensor=name)
        assert figures.ok, figures


class Turned(nn.Module):
    """Places and channels change roles between two convolutions, as attention's heads do."""

    def __init__(self, writes: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(32, 32, 1), nn.Conv2d(32, 32, 1)
        self.writes = writes

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        turned = y.flatten(2).transpose(1, 2).reshape(y.shape)
        if self.writes:
            turned.mul_(2.0)
        result: Tensor = self.second(turned)
        return result


@pytest.mark.parametrize(("writes", "verdict"), [(False, "taken"), (True, "refused")])
def test_a_reshape_that_copies_keeps_no_layout(writes: bool, verdict: str, planned_for_h200: list[Decision]) -> None:
    model, x = Turned(writes).bfloat16(), torch.randn(2, 32, 4, 4).bfloat16()
    with torch.no_grad():
        got = torch.compile(model, backend=backend)(x)
        torch.testing.assert_close(got, model(x), rtol=2e-2, atol=2e-2)
    assert [decision.verdict for decision in planned_for_h200] == [verdict], planned_for_h200
