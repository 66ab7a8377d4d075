"""Activations before extremes and comparisons, compiled to Triton kernels, in its interpreter."""

import pytest
import torch

from benchmarks.discontinuous import check


@pytest.mark.parametrize(
    ("reader", "dtype"), [("amax", torch.float32), ("at_least_amax", torch.bfloat16), ("max_pool1d", torch.float32)]
)
def test_activations_before_it_keep_the_contract(in_triton: None, reader: str, dtype: torch.dtype) -> None:
    assert [row for row in check(("gelu", "tanh", "polynomial"), reader, dtype) if not row.ok] == []
