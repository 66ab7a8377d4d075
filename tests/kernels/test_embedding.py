"""Sums of an embedding's gradient without a GPU, by PyTorch's operators."""

import pytest
import torch

from tests.kernels.embeddings import assert_sums
from tilewright.kernels import embedding as _defines_the_operators  # noqa: F401


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", [(0, 3, 5), (1, 1, 1), (50, 11, 7), (4, 3, 0)], ids=str)
@pytest.mark.parametrize("padding", [-1, 0])
def test_sums_are_exact_but_for_one_rounding(sizes: tuple[int, int, int], dtype: torch.dtype, padding: int) -> None:
    positions, entries, columns = sizes
    assert_sums(torch.randn(positions, columns).to(dtype), torch.randint(entries, (positions,)), entries, padding)
