"""Activations before extremes, sorts, poolings, comparisons and quantisers on a GPU: the sweep, a reader a test."""

import pytest
import torch

from benchmarks.discontinuous import ACTIVATIONS, DTYPES, ONLY_FLOAT32, READERS, bundles, check

pytestmark = pytest.mark.gpu


# PyTorch says so at its first call on a GPU.
@pytest.mark.filterwarnings("ignore:index_reduce.. is in beta:UserWarning")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("reader", READERS)
def test_activations_before_it_keep_the_contract(reader: str, dtype: torch.dtype) -> None:
    if dtype != torch.float32 and reader in ONLY_FLOAT32:
        pytest.skip("PyTorch has it only for fp32")
    found = [(names, row) for names in bundles(list(ACTIVATIONS)) for row in check(names, reader, dtype, "cuda")]
    assert [(names, row) for names, row in found if not row.ok] == []
