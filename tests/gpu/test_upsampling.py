"""Upsampling in compiled graphs on a GPU: the numbers contract, and gradients that scatter nothing."""

import pytest
import torch
import torch.nn.functional as F

from tests.contract import keeps_contract, launched
from tests.passes.test_upsampling import CALLS

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_sums_of_results(name: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    x = torch.randn(2, 5, 7, 11, device=GPU).to(dtype).contiguous(memory_format=layout).requires_grad_()
    assert set(launched(keeps_contract(CALLS[name], [x]))) == {"kernel"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_of_upsampled_classes_is_kernels_alone(dtype: torch.dtype) -> None:
    def loss(x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(F.interpolate(x, (36, 44), mode="bilinear"), target, ignore_index=3)

    x = torch.randn(2, 19, 9, 11, device=GPU).to(dtype).requires_grad_()
    target = torch.randint(19, (2, 36, 44), device=GPU)
    assert set(launched(keeps_contract(loss, [x, target]))) == {"kernel"}
