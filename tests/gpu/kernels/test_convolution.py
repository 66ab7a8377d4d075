"""Convolutions of few input channels on a GPU, against float64 and cuDNN's."""

import pytest
import torch

from tests.gpu.kernels.launching import in_turn
from tests.kernels.convolutions import CASES, Pair, keeps_contract
from tilewright.kernels.convolution import COLUMNS, convolution
from tilewright.launch.executor import EXTENSION

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


def test_the_executor_launches_its_kernel() -> None:
    """Windows' sizes are lists, which are part of the executor's key."""
    EXTENSION.module()
    assert EXTENSION.wait()
    x, weight = torch.randn(2, 3, 32, 32, device="cuda:0"), torch.randn(8, 3, 3, 3, device="cuda:0")
    convolution(x, weight, [1, 1], [1, 1], [1, 1], False, COLUMNS[0])
    with torch.profiler.profile(acc_events=True) as profiler:
        convolution(x, weight, [1, 1], [1, 1], [1, 1], False, COLUMNS[0])
        torch.cuda.synchronize()
    kernels = [event.name for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert [name for name in kernels if "memset" not in name.lower()] == ["convolve_rows"]
