"""Batch norm in training and at inference, compiled: outputs, gradients and running moments."""

import copy

import pytest
import torch
from torch import nn

from tilewright.backend import backend, recording
from tilewright.measure.truth.contract import compare
from tilewright.measure.truth.verify import verify

SHAPES = {"images": (4, 5, 3, 7), "one channel": (3, 1, 17), "rows": (33, 6), "wide": (2, 130, 1, 1)}


def model(shape: tuple[int, ...], training: bool, dtype: torch.dtype) -> nn.Module:
    """Batch norm with a weight, a bias and moments of its own, and a ReLU that can be fused."""
    kind = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}[len(shape)]
    torch.manual_seed(2)
    norm = kind(shape[1])
    for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
        assert tensor is not None
        nn.init.uniform_(tensor, 0.5, 1.5)
    return nn.Sequential(norm, nn.ReLU()).train(training).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_batch_norm_keeps_the_contract_in_one_kernel(
    shape: tuple[int, ...], training: bool, dtype: torch.dtype
) -> None:
    norm, x = model(shape, training, dtype), torch.randn(shape, dtype=dtype, requires_grad=training)
    with recording() as record, torch.set_grad_enabled(training):
        rows = verify(norm, torch.compile(norm, backend=backend, fullgraph=True), [x], training=training)
    assert [row for row in rows if not row.ok] == []
    assert record.fallbacks == []
    for graph in record.graphs:
        normed = [r for r in graph.plan.fusion.regions if any("batch_norm" in member.name for member in r.members)]
        assert len(normed) == 1 and len(normed[0].members) > 1


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_running_moments_follow_the_batches(shape: tuple[int, ...]) -> None:
    ours, eager = model(shape, True, torch.float32), model(shape, True, torch.float32)
    truth = copy.deepcopy(eager).double()
    compiled = torch.compile(ours, backend=backend, fullgraph=True)
    for _ in range(3):
        x = torch.randn(shape) * 2 + 1
        compiled(x), eager(x), truth(x.double())
    for (name, mine), other, true in zip(ours.named_buffers(), eager.buffers(), truth.buffers(), strict=True):
        figures = compare(mine, other, true, tensor=name)
        assert figures.ok, figures
