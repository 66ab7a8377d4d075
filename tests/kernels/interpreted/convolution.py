"""Convolutions of few input channels in Triton's interpreter, against float64 and PyTorch's."""

import pytest
import torch
from torch import nn

from tests.contract import check, keeps_contract, own, recorded
from tests.gpu.kernels.launching import in_turn
from tests.kernels import convolutions
from tests.kernels.convolutions import Pair
from tilewright.choose import chooser
from tilewright.kernels import convolution as kernels
from tilewright.kernels.convolution import offer


@pytest.mark.parametrize(
    ("x", "weight", "stride", "padding", "dilation", "dtype"),
    in_turn(convolutions.CASES, [(torch.float32, torch.bfloat16, torch.float16)]),
)
def test_the_contract_is_kept(
    x: tuple[int, ...], weight: tuple[int, ...], stride: Pair, padding: Pair, dilation: Pair, dtype: torch.dtype
) -> None:
    convolutions.keeps_contract(x, weight, stride, padding, dilation, dtype, "cpu")


def test_what_the_kernel_does_not_take() -> None:
    x, w = torch.zeros(1, 3, 8, 8), torch.zeros(4, 3, 3, 3)
    assert kernels.refusal(x, w) is None
    assert "one group" in str(kernels.refusal(x, w[:, :1])) and "2-D" in str(kernels.refusal(x[0], w))
    assert "fp32" in str(kernels.refusal(x.double(), w.double()))
    assert "16 input channels" in str(kernels.refusal(torch.zeros(1, 17, 8, 8), torch.zeros(4, 17, 3, 3)))
    assert "400 elements" in str(kernels.refusal(torch.zeros(1, 3, 99, 99), torch.zeros(4, 3, 12, 12)))
    assert "fewer than 27" in str(kernels.refusal(x, w[..., :2]))
    assert "empty" in str(kernels.refusal(x[:0], w))


class Stem(nn.Module):
    """The first layers of a vision model."""

    def __init__(self) -> None:
        super().__init__()
        own = torch.Generator().manual_seed(1)
        self.weight, self.bias = (nn.Parameter(torch.randn(shape, generator=own) / 5) for shape in ((6, 3, 3, 3), (6,)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.conv2d(x, self.weight, self.bias, 2, 1)).mean((2, 3))


@pytest.fixture
def races_are_won(in_triton: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of results of any size."""
    monkeypatch.setattr(offer, "LEAST_ELEMENTS", 0)
    monkeypatch.setattr(chooser._Priced, "refusal", property(lambda priced: priced.offer.refusal))


@pytest.mark.parametrize("training", [False, True])
def test_a_compiled_program_runs_it(training: bool, races_are_won: None) -> None:
    x = torch.randn(2, 3, 11, 13, generator=torch.Generator().manual_seed(2)).requires_grad_(training)
    assert own(keeps_contract(Stem(), [x], training=training)) == {"convolution"}


def test_one_number_for_both_dimensions_and_one_channel_channels_last(races_are_won: None) -> None:
    """The strides of a result of one channel tell in which layout it is."""

    def convolve(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.convolution(x, weight, None, [2], [1], [1], False, [0], 1)

    inputs = [
        torch.randn(shape).contiguous(memory_format=torch.channels_last) for shape in ((2, 3, 9, 7), (1, 3, 3, 3))
    ]
    call, record = recorded(convolve)
    check(convolve, call, inputs, training=False)
    assert own(record) == {"convolution"} and call(*inputs).stride() == convolve(*inputs).stride()
