"""Channels-last convolutions and group norms: which graphs take the layout; results and strides stay eager's."""

import copy
from collections.abc import Callable, Container
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from tests.contract import targets
from tests.gpu.kernels.launching import in_turn
from tilewright.backend import Recording, backend, recording
from tilewright.choose import layouts
from tilewright.choose.layouts import IN_TF32, channels_last
from tilewright.compile.stages import rewrite
from tilewright.graph import calls
from tilewright.hardware.target import target_named
from tilewright.kernels.norm.group import group_norm
from tilewright.kernels.offer import OURS, THEIRS
from tilewright.measure.truth.contract import compare
from tilewright.passes.convolution.channels_last import Convolution
from tilewright.records.outcomes import Outcome
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
        y = F.max_pool2d(self.second(y) + x, 2)
        return y, y.view(x.shape[0], -1).sum(-1)


@pytest.fixture
def planned_for_h200(monkeypatch: pytest.MonkeyPatch) -> list[Decision]:
    """The backend on a CPU with the layout of an H200; gives what was decided."""
    decided: list[Decision] = []

    def run(graph: torch.fx.Graph, target: Any) -> list[Decision]:
        decided.extend(channels_last(graph, H200) or ())
        return []

    monkeypatch.setattr(rewrite("channels_last"), "run", run)
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
    """The results of a compiled graph's kernels and library calls, without copies."""
    written = [node for region in graph.plan.fusion.regions for node in region.lowered.outputs]
    library = [node for node in graph.plan.units if isinstance(node, torch.fx.Node) and not calls.is_view(node)]
    return [node for node in written + library if node.op == "call_function" and "clone" not in str(node.target)]


def keeps_layout(record: Recording, channels: Container[int], longer_than: int = 0) -> None:
    """Every value of four dimensions and so many channels that is stored lies channels last."""
    for graph in record.graphs:
        for node in stored(graph):
            for value in calls.outputs(node):
                if value is not None and value.dim() == 4 and value.shape[1] in channels:
                    assert value.is_contiguous(memory_format=torch.channels_last) or value.shape[-1] <= longer_than, (
                        node
                    )


def trains_as_eager(model: nn.Module, x: Tensor) -> Recording:
    """Results, gradients and buffers keep the numbers contract, and lie as eager's do.

    The float64 model takes its own branches (`verify` gives it eager's): they are as close to ours as to eager's.
    """
    mine, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    with recording() as record:
        ours = _trained(torch.compile(mine, backend=backend, fullgraph=True), mine, x)
    for (name, value), eager, true in zip(
        ours.items(), _trained(model, model, x).values(), _trained(exact, exact, x.double()).values(), strict=True
    ):
        figures = compare(value, eager, true, tensor=name)
        assert figures.ok and wide_strides(value) == wide_strides(eager), figures
    return record


def _trained(call: Any, model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Results, the gradients of their mean squares, and buffers."""
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    results = tree_leaves(call(x))
    leaves = {"x": x, **dict(model.named_parameters())}
    torch.autograd.backward([y.to(torch.promote_types(y.dtype, torch.float32)).square().mean() for y in results])
    found = {str(number): y.detach() for number, y in enumerate(results)} | dict(model.named_buffers())
    return found | {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


def test_results_gradients_and_strides_are_eagers(planned_for_h200: list[Decision]) -> None:
    model, x = Block(32).bfloat16(), torch.randn(2, 32, 8, 10).bfloat16()
    record = trains_as_eager(model, x)
    assert [(d.verdict, d.reason) for d in planned_for_h200] == [
        ("taken", "the channels-last layout in place of that of 2 convolutions")
    ]
    assert all(y.is_contiguous(memory_format=torch.channels_last) for y in convolutions(record))


CONVOLUTION = nn.Conv2d(16, 16, 3).bfloat16()
LEFT: dict[str, tuple[Callable[[Tensor], Tensor], tuple[int, ...], str]] = {
    "few input channels": (nn.Conv2d(3, 64, 16, stride=16).bfloat16(), (1, 3, 32, 32), "fewer than 16 input channels"),
    "a result with gaps": (lambda x: CONVOLUTION(x)[..., ::2], *((1, 16, 8, 8), "a result has gaps")),
    "kept statistics of samples": (
        nn.Sequential(nn.Conv2d(32, 32, 3), nn.InstanceNorm2d(32, track_running_stats=True)).bfloat16(),
        *((2, 32, 8, 8), "reduces over pixels"),
    ),
    "a view of a part": (lambda x: CONVOLUTION(x)[:, :8].reshape(2, 8, 36), *((2, 16, 8, 8), "views a tensor")),
}


@pytest.mark.parametrize(("dtype", "verdict"), [(torch.float32, "refused"), (torch.bfloat16, "taken")])
def test_only_a_race_shows_what_rounds_to_tf32(dtype: torch.dtype, verdict: str) -> None:
    """On a GPU; a convolution of symbolic sizes is not raced, as is none whose tensors are on a CPU."""
    decided: list[Decision] = []

    def decide(module: fx.GraphModule, inputs: list[Tensor]) -> fx.GraphModule:
        decided.extend(channels_last(module.graph, replace(H200, is_present=True)) or ())
        return module

    torch.compile(nn.Conv2d(32, 32, 3).to(dtype), backend=decide)(torch.randn(2, 32, 8, 10, dtype=dtype))
    assert [decision.verdict for decision in decided] == [verdict]
    assert ("round to TF32" in decided[0].reason) == (verdict == "refused")


@pytest.mark.parametrize("name", LEFT)
def test_what_stays_as_it_is(name: str, planned_for_h200: list[Decision]) -> None:
    function, shape, why = LEFT[name]
    x = torch.randn(shape).bfloat16()
    with torch.no_grad(), recording() as record:
        got, wanted = torch.compile(function, backend=backend)(x), function(x)
    assert planned_for_h200[0].verdict == "refused" and why in planned_for_h200[0].reason
    assert all(y.is_contiguous() for y in convolutions(record)) and got.stride() == wanted.stride()
    torch.testing.assert_close(got, wanted, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("convolution", "shape"), [(nn.Conv2d(32, 8, 3), (32, 9, 9)), (nn.Conv3d(32, 8, 3), (32, 5, 5, 5))]
)
def test_one_image_without_a_batch_stays_as_it_is(
    convolution: nn.Module, shape: tuple[int, ...], planned_for_h200: list[Decision]
) -> None:
    x = torch.randn(shape)
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(convolution, backend=backend)(x), convolution(x))
    assert not planned_for_h200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_convolutions_take_the_layout(dtype: torch.dtype, planned_for_h200: list[Decision]) -> None:
    model = Block(32, groups=32).to(dtype).eval()
    with torch.no_grad():
        torch.compile(model, backend=backend)(torch.randn(1, 32, 32, 32, dtype=dtype))
    assert [decision.verdict for decision in planned_for_h200] == ["taken"]


RACES = {
    "faster": (100, "", 90, "", "taken"),
    "faster by less than four copies take": (100, "", 99.9, "", "tried and lost"),
    "slower": (100, "", 120, "", "tried and lost"),
    "rounded as before": (100, IN_TF32, 90, IN_TF32, "taken"),
    "rounded where eager is not": (100, "", 90, IN_TF32, "refused"),
}


@pytest.mark.parametrize("name", RACES)
def test_races_decide_with_the_time_of_copies(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    as_is, rounds, last, last_rounds, verdict = RACES[name]
    asked: list[Convolution] = []

    class Raced:
        def outcome(self, measure: bool = True) -> Outcome:
            return Outcome({THEIRS + rounds: as_is, OURS + last_rounds: last})

    def race(convolution: Convolution) -> Raced:
        asked.append(convolution)
        return Raced()

    decisions: list[Decision] = []

    def run(module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        decisions.extend(channels_last(module.graph, H200) or ())
        return module.forward

    monkeypatch.setattr(layouts, "layout_race", race)
    torch._dynamo.reset()
    with torch.no_grad():
        torch.compile(Block(32).eval(), backend=run)(torch.randn(2, 32, 8, 10))
    assert [decision.verdict for decision in decisions] == [verdict]
    assert [(one.function, one.input[0], one.weight[0], one.gradients) for one in asked] == [
        ("conv2d", (2, 32, 8, 10), (32, 32, 3, 3), (False, False)),
        ("conv2d", (2, 32, 8, 10), (32, 32, 1, 1), (False, False)),
    ]


class Classifier(nn.Module):
    """Two residual blocks whose batch norms take the moments of the batch, in place as torchvision's do."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        # A norm takes a bias out again: its gradient is 0 but for rounding.
        layers = (nn.Conv2d(channels, channels, n, padding=n // 2, bias=False) for n in (3, 1, 3))
        self.convolutions = nn.ModuleList(layers)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(3))
        self.head = nn.Linear(channels, 5)

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            y = norm(convolution(x))
            y += x
            x = F.relu(y, inplace=True)
        x = F.max_pool2d(x, 3, 2, 1)
        pooled: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return pooled


class ResponseNorm(nn.Module):
    """A ConvNeXt V2 block: its channels are last while it norms the responses over all places."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(channels, channels, 3, padding=1, groups=channels)
        self.dense = nn.Conv2d(channels, channels, 3, padding=1)
        self.widen, self.narrow = nn.Linear(channels, 2 * channels), nn.Linear(2 * channels, channels)

    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.widen(self.dense(self.depthwise(x)).permute(0, 2, 3, 1)))
        response = y.norm(dim=(1, 2), keepdim=True)
        y = y * (response / (response.mean(-1, keepdim=True) + 1e-6)) + y
        return x + self.narrow(y).permute(0, 3, 1, 2)


def test_what_has_its_channels_last_by_shape_stays_contiguous(planned_for_h200: list[Decision]) -> None:
    torch.manual_seed(1)
    record = trains_as_eager(ResponseNorm(32).bfloat16(), torch.randn(2, 32, 6, 10).bfloat16())
    assert planned_for_h200[0].verdict == "taken"
    values = [n.meta["val"] for graph in record.graphs for n in graph.plan.graph.nodes if n.op == "call_function"]
    widened = [x for x in values if isinstance(x, Tensor) and x.shape == (2, 6, 10, 64)]
    assert widened and all(x.is_contiguous() for x in widened)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_training_keeps_the_layout_forward_and_backward(
    layout: torch.memory_format, planned_for_h200: list[Decision]
) -> None:
    """No value of four dimensions lies otherwise, and no batch norm is left whole."""
    torch.manual_seed(1)
    model = Classifier(32).bfloat16().to(memory_format=layout)
    x = torch.randn(8, 32, 14, 14).bfloat16().contiguous(memory_format=layout)
    record = trains_as_eager(model, x)
    assert planned_for_h200[0].verdict == "taken"
    assert not [target for target in targets(record) if "batch_norm" in target]
    keeps_layout(record, (32,))


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


@pytest.mark.parametrize("writes", [False, True])
def test_a_view_keeps_its_layout(writes: bool, planned_for_h200: list[Decision]) -> None:
    model, x = Turned(writes).bfloat16(), torch.randn(2, 32, 4, 4).bfloat16()
    with torch.no_grad():
        got = torch.compile(model, backend=backend)(x)
        torch.testing.assert_close(got, model(x), rtol=2e-2, atol=2e-2)
    assert [decision.verdict for decision in planned_for_h200] == ["taken"], planned_for_h200


class Windows(nn.Module):
    """As HaloNet's attention: overlapping windows that a reshape copies; and VOLO's: a view in another order, which is
    a result, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        windows = F.pad(self.first(x), [1, 1, 1, 1]).unfold(2, 4, 2).unfold(3, 4, 2)
        near = windows.reshape(4, 8, 9, 16).permute(0, 2, 1, 3).softmax(-1)
        turned = self.second(x).permute(0, 2, 3, 1) + 1
        return near.sum(-1), turned.reshape(2, -1, 16).sin(), turned


def test_reshapes_that_copy_and_views_in_another_order(planned_for_h200: list[Decision]) -> None:
    trains_as_eager(Windows().bfloat16(), torch.randn(2, 16, 6, 6).bfloat16())
    assert [decision.verdict for decision in planned_for_h200] == ["taken"], planned_for_h200


def test_heads_viewed_in_channels_last_tensors(planned_for_h200: list[Decision]) -> None:
    """As CoAtNet's attention: eager's products of queries lie channels-last, and heads are views of them."""
    convolution = nn.Conv2d(32, 48, 1).bfloat16()

    def attention(x: Tensor) -> Tensor:
        y = convolution(x.permute(0, 3, 1, 2))
        q, k, v = y.view(2, 2, 24, -1).chunk(3, dim=2)
        out = F.scaled_dot_product_attention(*(t.transpose(2, 3) for t in (q, k, v)))
        return convolution(out.transpose(2, 3).reshape(2, 16, 4, 4).repeat(1, 2, 1, 1))

    x = torch.randn(2, 4, 4, 32).bfloat16()
    with torch.no_grad():
        got = torch.compile(attention, backend=backend)(x)
        torch.testing.assert_close(got, attention(x), rtol=2e-2, atol=2e-2)
    assert [decision.verdict for decision in planned_for_h200] == ["taken"], planned_for_h200


class DiffusionBlock(nn.Module):
    """The residual block of a diffusion U-Net, between what it pools and what it repeats."""

    def __init__(self, channels: int, groups: int, affine: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(groups, channels, affine=affine) for _ in range(2))
        self.convolutions = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = kept = self.convolutions[0](x)
        y = F.avg_pool2d(y, 2)
        for norm, convolution in zip(self.norms, self.convolutions[1:], strict=True):
            y = convolution(F.silu(norm(y)))
        return torch.cat([F.interpolate(y, scale_factor=2.0), kept], 1)


@pytest.mark.parametrize(("groups", "affine"), in_turn([4, 32, 1], [(True, False)]), ids=str)
def test_group_norms_keep_the_layout_and_the_contract(
    groups: int, affine: bool, planned_for_h200: list[Decision]
) -> None:
    torch.manual_seed(groups)
    model, x = DiffusionBlock(32, groups, affine).bfloat16(), (torch.randn(2, 32, 14, 18) + 3).bfloat16()
    record = trains_as_eager(model, x)
    assert planned_for_h200[0].verdict == "taken" and record.fallbacks == []
    assert not [target for target in targets(record) if "group_norm" in target]
    keeps_layout(record, (32, 64), longer_than=3)


def test_group_norms_in_inference_and_uncompiled_calls(planned_for_h200: list[Decision]) -> None:
    """Where a graph runs as PyTorch runs it, the operator computes its formula."""
    model = DiffusionBlock(32, 4, True).bfloat16()
    x = torch.randn(2, 32, 14, 18).bfloat16()
    with torch.no_grad():
        got, wanted = torch.compile(model, backend=backend, fullgraph=True)(x), model(x)
        torch.testing.assert_close(got, wanted, rtol=3e-2, atol=3e-2)
        weight, bias = torch.rand(32).bfloat16(), torch.rand(32).bfloat16()
        x = x.contiguous(memory_format=torch.channels_last)
        y = group_norm(x, 4, weight, bias, 1e-5)
        torch.testing.assert_close(y, F.group_norm(x, 4, weight, bias), rtol=2e-2, atol=2e-2)
        assert y.is_contiguous(memory_format=torch.channels_last)


def test_group_norm_is_pytorchs_idea_of_an_operator() -> None:
    x = torch.randn(2, 8, 3, 5).bfloat16().contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.rand(8).bfloat16().requires_grad_()
    arguments: tuple[Any, ...] = (x, 2, weight, None, 1e-5)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.tilewright.group_norm.default, arguments, test_utils=utilities)
