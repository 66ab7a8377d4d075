"""Norms and softmax cut into sums over columns and what uses them, and what backward keeps of a norm.

Batch norms of channels-last tensors; few long rows on a GPU; on a CPU rows along an axis that is not the last.
"""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend.compiling import agrees
from tests.contract import keeps_contract
from tests.gpu.kernels.launching import DTYPES, in_turn
from tests.passes.graphs import aten, calls
from tilewright.backend import Recording, backend, recording
from tilewright.hardware.target import target_named
from tilewright.measure.truth.contract import compare
from tilewright.passes.strided import STRIDED_BYTES, split_strided_rows

ops = torch.ops.aten
SHAPES = {"images": (4, 33, 17, 19), "one place": (1024, 37, 1, 1), "rows": (512, 96), "volumes": (3, 16, 8, 9, 10)}
FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
NORMS = {2: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}


def laid(x: Tensor) -> Tensor:
    layout = FORMATS.get(x.dim())
    return x if layout is None else x.contiguous(memory_format=layout)


def model(shape: tuple[int, ...], dtype: torch.dtype, affine: bool = True) -> nn.Module:
    torch.manual_seed(2)
    norm = NORMS[len(shape)](shape[1], affine=affine)
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        if tensor is not None:
            nn.init.uniform_(tensor, 0.5, 1.5)
    return nn.Sequential(norm, nn.ReLU()).to(dtype)


def nests(record: Any) -> list[Any]:
    """The nests that read or write the whole tensor."""
    regions = [region for graph in record.graphs for region in graph.plan.fusion.regions]
    return [r.lowered.nest for r in regions if max(b.elements for b in r.lowered.nest.buffers) > STRIDED_BYTES // 8]


@pytest.mark.parametrize(("shape", "dtype"), in_turn([(shape,) for shape in SHAPES.values()], [DTYPES]), ids=str)
def test_two_kernels_each_way_keep_the_contract(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    record = keeps_contract(model(shape, dtype), [laid(torch.randn(shape) * 2 + 3).to(dtype).requires_grad_()])
    assert record.fallbacks == []
    assert len(nests(record)) == 4
    # Channels are the columns: nothing is walked with a stride.
    assert all(nest.cols[-1] % shape[1] == 0 for nest in nests(record))


@pytest.mark.parametrize("offset", [0.0, 100.0, 1e4])
def test_moments_far_from_zero(offset: float) -> None:
    """Squares of numbers far from zero cancel: in double nothing is lost."""
    ours = model((4, 33, 17, 19), torch.float32, affine=False)
    eager, truth = copy.deepcopy(ours), copy.deepcopy(ours).double()
    x = laid(torch.randn(4, 33, 17, 19) + offset)
    got, theirs, true = torch.compile(ours, backend=backend, fullgraph=True)(x), eager(x), truth(x.double())
    assert compare(got, theirs, true, tensor="y").ok
    for (name, mine), other, exact in zip(ours.named_buffers(), eager.buffers(), truth.buffers(), strict=True):
        figures = compare(mine, other, exact, tensor=name)
        assert figures.ok, figures


@pytest.mark.parametrize("what", ["NCHW", "small", "float64", "evaluation"])
def test_what_stays_one_nest(what: str) -> None:
    shape = (2, 5, 3, 4) if what == "small" else (4, 33, 17, 19)
    norm = model(shape, torch.float64 if what == "float64" else torch.float32).train(what != "evaluation")
    x = torch.randn(shape, dtype=next(norm.parameters()).dtype)
    with recording() as record, torch.no_grad():
        got = torch.compile(norm, backend=backend, fullgraph=True)(x if what == "NCHW" else laid(x))
    torch.testing.assert_close(got, copy.deepcopy(norm)(x))
    members = [m for graph in record.graphs for r in graph.plan.fusion.regions for m in r.members]
    assert any("batch_norm" in str(member.target) for member in members)


def test_a_gradient_in_another_layout_is_copied_by_its_maker() -> None:
    norm, x = model((4, 33, 17, 19), torch.float32), laid(torch.randn(4, 33, 17, 19)).requires_grad_()
    record = keeps_contract(lambda x: norm(x).mean((2, 3)), [x])
    backward = next(graph for graph in record.graphs if graph.plan.name == "backward")
    assert all(
        node.meta["val"].is_contiguous(memory_format=torch.channels_last)
        for region in backward.plan.fusion.regions
        for node in region.lowered.outputs
        if node.meta["val"].dim() == 4
    )


PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(1),
    "log softmax": lambda x: x.log_softmax(1),
    "log softmax of the first axis": lambda x: x.log_softmax(0).sin(),
    "logarithm of sums": lambda x: x.logsumexp(1),
    "variance": lambda x: x.var(1),
    "variance of two axes": lambda x: x.var((0, 1), correction=0),
    "deviation": lambda x: x.std(1, keepdim=True) + x,
    "variance and mean": lambda x: torch.add(*torch.var_mean(x, (0, 1))),
}
SHAPE = (5, 37, 18, 17)


@pytest.mark.parametrize(("name", "dtype"), in_turn(PROGRAMS, [DTYPES]), ids=str)
def test_kernels_over_columns_keep_the_contract(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    record = keeps_contract(PROGRAMS[name], [x])
    ran = [call for graph in record.graphs for call in calls(graph.plan.graph)]
    assert not any(word in call for call in ran for word in ("softmax", "logsumexp", "var", "std"))


PLACES_OF = [torch.argmax, torch.argmin, torch.max, torch.min]


@pytest.mark.parametrize(
    ("function", "keepdim", "dtype"),
    in_turn(itertools.product(PLACES_OF, (False, True)), [(torch.float32, torch.bfloat16)]),
)
def test_places_of_extremes_are_eagers(function: Callable[..., Any], keepdim: bool, dtype: torch.dtype) -> None:
    x = torch.randint(-3, 4, (2, 17, 1100), generator=torch.Generator().manual_seed(0)).to(dtype)
    x[0, :, 0], x[1, 3, 1], x[0, 4, 2], x[1, 5:9, 3] = -torch.inf, -torch.inf, torch.inf, torch.nan
    agrees(lambda x: function(x, 1, keepdim=keepdim), [x])
    graph = aten(lambda x: function(x, -2, keepdim=keepdim), x)
    split_strided_rows(graph, target_named("cpu"))
    assert any("amax" in call or "amin" in call for call in calls(graph))


CHANNELS, PLACES = 24, 13 * 11


class Gated(nn.Module):
    """Convolution, norm, SiLU and a gate of each channel, twice over the channels in between."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(CHANNELS, CHANNELS, 1), nn.Conv2d(CHANNELS, 8, 1)
        self.norm = nn.BatchNorm2d(CHANNELS)
        self.gate = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.silu(self.norm(self.first(x)))
        found: Tensor = self.last(y * self.gate(y.mean((2, 3), keepdim=True)).sigmoid())
        return found


def large(record: Recording) -> list[str]:
    """Backward's inputs over all channels and places, without the model's input."""
    graph = record.graphs[1].plan.graph
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    return [node.name for node in inputs if node.meta["val"].numel() == 8 * CHANNELS * PLACES]


def test_backward_gets_operands_of_convolutions_and_of_norms() -> None:
    model = Gated().to(memory_format=torch.channels_last)
    x = torch.randn(8, CHANNELS, 13, 11).contiguous(memory_format=torch.channels_last)
    record = keeps_contract(model, [x])
    assert record.fallbacks == []
    # The input, what the first convolution gives and what the last one takes: not the norm's result, nor SiLU's.
    assert len(large(record)) == 3
