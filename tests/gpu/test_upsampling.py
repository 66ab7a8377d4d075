"""Upsampling in compiled graphs on a GPU: the numbers contract, and gradients that scatter nothing."""

from __future__ import annotations

import pytest
import torch

from tests.contract import keeps_contract, launched
from tests.passes.test_upsampling import CALLS

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("afresh")]
GPU = torch.device("cuda:0")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_gradients_are_sums_of_results(name: str, dtype: torch.dtype, layout: torch.memory_format) -> None:
    x = torch.randn(2, 5, 7, 11, device=GPU).to(dtype).contiguous(memory_format=layout).requires_grad_()
    assert set(launched(keeps_contract(CALLS[name], [x]))) == {"kernel"}
