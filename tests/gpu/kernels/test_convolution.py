"""Convolutions of few input channels on a GPU, against float64 and cuDNN's."""

import pytest
import torch

from tests.gpu.kernels.launching import in_turn
from tests.kernels.convolutions import CASES, Pair, keeps_contract

pytestmark = pytest.mark.gpu
FIRST_LAYERS = [
    ((4, 3, 224, 224), (64, 3, 7, 7), (2, 2), (3, 3), (1, 1)),
    ((4, 8, 130, 260), (64, 8, 3, 3), (1, 1), (0, 0), (1, 1)),
    ((2, 3, 227, 227), (96, 3, 11, 11), (4, 4), (2, 2), (1, 1)),
]


@pytest.mark.parametrize(
    ("x", "weight", "stride", "padding", "dilation", "dtype"),
    in_turn([*CASES, *FIRST_LAYERS], [(torch.float32,), (torch.bfloat16, torch.float16)]),
)
def test_the_contract_is_kept(
    x: tuple[int, ...], weight: tuple[int, ...], stride: Pair, padding: Pair, dilation: Pair, dtype: torch.dtype
) -> None:
    keeps_contract(x, weight, stride, padding, dilation, dtype, "cuda:0")
