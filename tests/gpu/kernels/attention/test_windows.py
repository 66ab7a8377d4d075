"""Attention within windows on a GPU: the numbers contract, and in a compiled program beside eager."""

import pytest
import torch

from tests.kernels.attention.windows import CALLS, Windows, judged

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
MANY = [
    Windows(windows=4096, heads=3, masks=64, mask_heads=3),
    Windows(windows=1000, heads=4, masks=1, mask_heads=1, queries=64, keys=64),
    Windows(windows=300, heads=12, masks=0, queries=50, keys=50, width=64, value_width=64, dtype=torch.float16),
    Windows(windows=36, heads=1, queries=16, keys=16, masks=36, mask_heads=1, width=24, value_width=24),
    Windows(windows=129, heads=5, queries=3, keys=61, masks=43, mask_heads=5, width=40, value_width=8, packed=False),
]


@pytest.mark.parametrize("call", [*CALLS, *MANY], ids=str)
def test_the_numbers_contract(call: Windows) -> None:
    for seed in range(3):
        assert [row for row in judged(call, GPU, seed) if not row.ok] == []
