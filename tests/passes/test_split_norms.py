"""Batch norms of channels-last tensors: cut into column sums and what uses them, the same numbers as in one nest."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract import keeps_contract
from tests.passes.graphs import aten, calls, run
from tilewright.backend import backend, recording
from tilewright.hardware.target import target_named
from tilewright.measure.truth.contract import compare
from tilewright.passes.fusion import STRIDED_BYTES
from tilewright.passes.split_norms import split_norms

ops = torch.ops.aten
SHAPES = {
    "images": (4, 33, 17, 19),
    "one place": (1024, 37, 1, 1),
    "rows": (512, 96),
    "volumes": (3, 16, 8, 9, 10),
}
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
    """Those that read or write the whole tensor."""
    regions = [region for graph in record.graphs for region in graph.plan.fusion.regions]
    return [r.lowered.nest for r in regions if max(b.elements for b in r.lowered.nest.buffers) > STRIDED_BYTES // 8]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
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


FEW_LONG_ROWS: dict[str, Callable[..., Any]] = {
    "batch norm": lambda x, w, b, g: ops._native_batch_norm_legit_functional(x, w, b, w, b, True, 0.1, 1e-5),
    "instance norm": lambda x, w, b, g: ops._native_batch_norm_legit.no_stats(x, w, b, True, 0.1, 1e-5),
    "without weights": lambda x, w, b, g: ops._native_batch_norm_legit.no_stats(x, None, None, True, 0.1, 1e-5),
    "gradient": lambda x, w, b, g: ops.native_batch_norm_backward(
        g, x, w, None, None, b, w, True, 1e-5, [True, True, True]
    ),
    "group norm": lambda x, w, b, g: ops.native_group_norm(x, w, b, 2, 4, 200 * 200, 2, 1e-5),
    "group norm without weights": lambda x, w, b, g: ops.native_group_norm(x, None, None, 2, 4, 200 * 200, 1, 1e-5),
}


@pytest.mark.parametrize("name", FEW_LONG_ROWS)
def test_few_long_rows_are_summed_apart_on_a_gpu(name: str) -> None:
    generator = torch.Generator().manual_seed(3)
    x, g = (torch.randn(2, 4, 200, 200, generator=generator) * 2 + 1 for _ in range(2))
    w, b = (torch.rand(4, generator=generator) + 0.5 for _ in range(2))
    graph = aten(FEW_LONG_ROWS[name], x, w, b, g)
    split_norms(graph, target_named("cpu"))
    assert any("norm" in call for call in calls(graph))
    split_norms(graph, target_named("h200"))
    assert not any("norm" in call for call in calls(graph))
    true = FEW_LONG_ROWS[name](x.double(), w.double(), b.double(), g.double())
    for ours, exact in zip(run(graph, x, w, b, g), true, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))
