"""Convolutions in patches become products; results, gradients and strides are eager's."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.contract import targets
from tests.passes.test_channels_last import planned_for_h200, trains_as_eager
from tilewright.compile.stages import rewrite
from tilewright.hardware.target import target_named
from tilewright.passes.convolution.other_forms import multiply_patches

assert planned_for_h200


@pytest.fixture
def in_patches(monkeypatch: pytest.MonkeyPatch, planned_for_h200: object) -> None:
    h200 = target_named("h200")
    monkeypatch.setattr(rewrite("multiply_patches"), "run", lambda graph, _: multiply_patches(graph, h200))


class Embedded(nn.Module):
    """Patches as a sequence, with positions."""

    def __init__(self, convolution: nn.Conv2d, tokens: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.convolution, self.tokens = convolution, tokens
        self.position = nn.Parameter(torch.randn(convolution.out_channels))

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.tokens(self.convolution(x)) + self.position)


def of_transformers(y: Tensor) -> Tensor:
    return y.flatten(2).transpose(1, 2)


def of_convnets(y: Tensor) -> Tensor:
    return y.permute(0, 2, 3, 1)


@pytest.mark.parametrize("tokens", [of_transformers, of_convnets])
@pytest.mark.parametrize(
    ("channels", "window", "bias"), [(3, (4, 4), True), (3, (2, 6), False), (1, (4, 3), True)], ids=str
)
def test_patches_are_multiplied(
    channels: int, window: tuple[int, int], bias: bool, tokens: Callable[[Tensor], Tensor], in_patches: None
) -> None:
    torch.manual_seed(1)
    model = Embedded(nn.Conv2d(channels, 16, window, window, bias=bias), tokens).bfloat16()
    record = trains_as_eager(model, torch.randn(3, channels, 12, 24).bfloat16())
    assert not [target for target in targets(record) if "convolution" in target]


OTHERS = {
    "overlapping": (nn.Conv2d(3, 16, 4, 2), 12),
    "padded": (nn.Conv2d(3, 16, 4, 4, padding=2), 12),
    "dilated": (nn.Conv2d(3, 16, 2, 2, dilation=2), 12),
    "aligned": (nn.Conv2d(8, 16, 4, 4), 12),
    "in groups": (nn.Conv2d(6, 16, 4, 4, groups=2), 12),
    "with an edge left over": (nn.Conv2d(3, 16, 4, 4), 14),
}


@pytest.mark.parametrize("case", OTHERS)
def test_others_stay(case: str, in_patches: None) -> None:
    torch.manual_seed(1)
    convolution, size = OTHERS[case]
    model = Embedded(convolution, of_transformers).bfloat16()
    record = trains_as_eager(model, torch.randn(2, convolution.in_channels, size, size).bfloat16())
    assert [target for target in targets(record) if "convolution" in target]


def test_a_reader_may_ask_for_contiguous_images(in_patches: None) -> None:
    torch.manual_seed(1)
    model = Embedded(nn.Conv2d(3, 16, 4, 4), lambda y: y.view(3, -1, 16)).bfloat16()
    record = trains_as_eager(model, torch.randn(3, 3, 12, 24).bfloat16())
    assert not [target for target in targets(record) if "convolution" in target]
