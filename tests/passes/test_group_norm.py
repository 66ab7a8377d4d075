"""Group norm of channels-last tensors: sums and pointwise kernels that keep the layout and the numbers contract."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract import targets
from tests.passes.test_channels_last import keeps_layout, planned_for_h200, trains_as_eager
from tilewright.backend import backend
from tilewright.passes.group_norm import group_norm
from tilewright.records.program import Decision

assert planned_for_h200


class Block(nn.Module):
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


@pytest.mark.parametrize("affine", [True, False], ids=["affine", "plain"])
@pytest.mark.parametrize("groups", [4, 32, 1])
def test_training_keeps_the_layout_and_the_contract(
    groups: int, affine: bool, planned_for_h200: list[Decision]
) -> None:
    torch.manual_seed(groups)
    model, x = Block(32, groups, affine).bfloat16(), (torch.randn(2, 32, 14, 18) + 3).bfloat16()
    record = trains_as_eager(model, x)
    assert planned_for_h200[0].verdict == "taken" and record.fallbacks == []
    assert not [target for target in targets(record) if "group_norm" in target]
    keeps_layout(record, (32, 64), longer_than=3)


def test_inference_and_uncompiled_calls(planned_for_h200: list[Decision]) -> None:
    """Where a graph runs as PyTorch runs it, the operator computes its formula."""
    model = Block(32, 4, True).bfloat16()
    x = torch.randn(2, 32, 14, 18).bfloat16()
    with torch.no_grad():
        got, wanted = torch.compile(model, backend=backend, fullgraph=True)(x), model(x)
        torch.testing.assert_close(got, wanted, rtol=3e-2, atol=3e-2)
        weight, bias = torch.rand(32).bfloat16(), torch.rand(32).bfloat16()
        x = x.contiguous(memory_format=torch.channels_last)
        y = group_norm(x, 4, weight, bias, 1e-5)
        torch.testing.assert_close(y, F.group_norm(x, 4, weight, bias), rtol=2e-2, atol=2e-2)
        assert y.is_contiguous(memory_format=torch.channels_last)


def test_the_operators_are_pytorchs_idea_of_one() -> None:
    x = torch.randn(2, 8, 3, 5).bfloat16().contiguous(memory_format=torch.channels_last).requires_grad_()
    weight = torch.rand(8).bfloat16().requires_grad_()
    arguments: tuple[Any, ...] = (x, 2, weight, None, 1e-5)
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.tilewright.group_norm.default, arguments, test_utils=utilities)
