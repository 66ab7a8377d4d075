"""Convolutions of sequences and volumes in channels-last layouts: results, gradients and strides are eager's."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract import targets
from tests.passes.test_channels_last import convolutions, planned_for_h200, stored, trains_as_eager
from tilewright.backend import Recording, backend, recording
from tilewright.compile.stages import rewrite
from tilewright.graph import calls
from tilewright.graph.layouts import lies_channels_last
from tilewright.hardware.target import target_named
from tilewright.passes.convolution.other_forms import convolve_as_images
from tilewright.records.program import Decision

assert planned_for_h200
LAYOUT = "the channels-last layout in place of that of 3 convolutions"


@pytest.fixture
def of_one_row(monkeypatch: pytest.MonkeyPatch, planned_for_h200: list[Decision]) -> list[Decision]:
    h200 = target_named("h200")
    monkeypatch.setattr(rewrite("convolve_as_images"), "run", lambda graph, _: convolve_as_images(graph, h200))
    return planned_for_h200


def volumes_lie_channels_last() -> bool:
    """Whether this CPU has kernels of oneDNN for volumes of 16 bits; PyTorch's own give contiguous results."""
    x = torch.randn(8, 32, 5, 5, 5).bfloat16().contiguous(memory_format=torch.channels_last_3d)
    return lies_channels_last(F.conv3d(x, x[..., :3, :3, :3]))


of_volumes = pytest.mark.skipif(
    not volumes_lie_channels_last(), reason="convolutions of volumes give contiguous results on this CPU"
)


class Gated(nn.Module):
    """Dilated gated convolutions of a sequence, downwards and up again, with a norm and a mean over time."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv1d(32, 64, 3, dilation=2)
        self.down = nn.Conv1d(32, 32, 4, stride=2, padding="valid", groups=2)
        self.up = nn.ConvTranspose1d(32, 32, 4, 2, padding=1, output_padding=1, bias=False)
        self.norm = norm

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        a, b = self.first(F.pad(x, (4, 0))).chunk(2, 1)
        y = self.norm(self.down(a.tanh() * b.sigmoid()))
        y = F.gelu(self.up(y))
        return y, F.adaptive_avg_pool1d(y, 1).squeeze(-1) + y.mean(-1)


class Volume(nn.Module):
    """A small U-Net of volumes."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.last = nn.Conv3d(32, 32, 3, padding=1), nn.Conv3d(64, 4, 1)
        self.up, self.norm = nn.ConvTranspose3d(32, 32, 2, 2), norm

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept = F.leaky_relu(self.norm(self.first(x)), 0.1)
        return self.last(torch.cat([kept, self.up(kept[..., ::2, ::2, ::2])], 1)), kept.mean((2, 3, 4))


def takes_the_layout(record: Recording) -> None:
    """Every convolution gives images or volumes whose channels are last; group and instance norms are generated."""
    found = convolutions(record)
    assert found and all(y.dim() > 3 and lies_channels_last(y) for y in found)
    assert not [target for target in targets(record) if "group_norm" in target or "instance" in target]


@pytest.mark.parametrize("norm", ["batch", "group", "instance", "affine instance"])
def test_sequences_are_images_of_one_row(norm: str, of_one_row: list[Decision]) -> None:
    torch.manual_seed(1)
    norms = {
        "batch": nn.BatchNorm1d(32),
        "group": nn.GroupNorm(4, 32),
        "instance": nn.InstanceNorm1d(32),
        "affine instance": nn.InstanceNorm1d(32, affine=True),
    }
    record = trains_as_eager(Gated(norms[norm]).bfloat16(), torch.randn(3, 32, 38).bfloat16())
    assert [(d.verdict, d.reason) for d in of_one_row] == [("taken", LAYOUT)]
    takes_the_layout(record)


@of_volumes
@pytest.mark.parametrize("norm", ["batch", "group", "instance"])
def test_volumes(norm: str, of_one_row: list[Decision]) -> None:
    torch.manual_seed(1)
    norms = {"batch": nn.BatchNorm3d(32), "group": nn.GroupNorm(4, 32), "instance": nn.InstanceNorm3d(32, affine=True)}
    record = trains_as_eager(Volume(norms[norm]).bfloat16(), torch.randn(2, 32, 6, 8, 4).bfloat16())
    assert [(d.verdict, d.reason) for d in of_one_row] == [("taken", LAYOUT)]
    takes_the_layout(record)


@pytest.mark.parametrize(
    ("places", "norm"),
    [(1, nn.Identity()), (1, nn.GroupNorm(32, 32)), pytest.param(3, nn.Identity(), marks=of_volumes)],
)
def test_what_a_convolution_of_one_channel_gives_is_laid_out_once(
    places: int, norm: nn.Module, of_one_row: list[Decision]
) -> None:
    """Among tensors of its shape, only its own result and copies of gradients are contiguous."""
    torch.manual_seed(1)
    of = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[places - 1]
    layers = [of(1, 32, 3, padding=1), norm, nn.ReLU(), of(32, 32, 3, padding=1), nn.ReLU(), of(32, 2, 1)]
    record = trains_as_eager(nn.Sequential(*layers).bfloat16(), torch.randn(2, 1, *(8, 6, 4)[:places]).bfloat16())
    first, *others = convolutions(record)
    assert first.is_contiguous() and len(others) == 2 and all(lies_channels_last(y) for y in others)
    lying = [y for graph in record.graphs for node in stored(graph) for y in calls.outputs(node) if y is not None]
    contiguous = [y for y in lying if y.shape == first.shape and y.is_contiguous()]
    assert len(contiguous) == 1, "only copies of it, and of its gradient, lie otherwise"
    assert not [target for target in targets(record) if "group_norm" in target]


def test_depthwise_ones_and_single_sequences_stay(of_one_row: list[Decision]) -> None:
    depthwise = nn.Conv1d(32, 32, 5, padding=2, groups=32).bfloat16()
    for call, x in ((depthwise, torch.randn(2, 32, 9)), (nn.Conv1d(32, 16, 3).bfloat16(), torch.randn(32, 9))):
        with torch.no_grad(), recording() as record:
            got = torch.compile(call, backend=backend, fullgraph=True)(x.bfloat16())
        torch.testing.assert_close(got, call(x.bfloat16()), rtol=2e-2, atol=2e-2)
        assert [y.dim() for y in convolutions(record)] == [3] and of_one_row == []


@pytest.mark.parametrize(("dilation", "trains", "stays"), [(16, True, True), (8, True, False), (16, False, False)])
def test_two_taps_far_apart_stay_in_training(
    dilation: int, trains: bool, stays: bool, of_one_row: list[Decision]
) -> None:
    layer = nn.Conv1d(256, 512, 2, dilation=dilation, bias=False).bfloat16().requires_grad_(trains)
    with torch.set_grad_enabled(trains), recording() as record:
        torch.compile(layer, backend=backend, fullgraph=True)(torch.randn(1, 256, 20).bfloat16())
    assert {y.dim() for y in convolutions(record)} == {3 if stays else 4}
