"""A 16-bit value that is converted to a wider dtype is the stored one, in C++ (in Triton: `interpreted.py`)."""

import pytest
import torch

from tests.emit.stored_values import DTYPES, differing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_conversion_reads_what_is_stored(dtype: torch.dtype) -> None:
    assert differing(dtype) == []
