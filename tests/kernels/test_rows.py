"""Operators of rows without a GPU: the numbers contract of what PyTorch computes then, and how rows lie."""

import pytest
import torch

from tests.kernels.row_operators import CALLS, broken
from tests.kernels.rows import layout
from tilewright.kernels.row import RowLayout, alignment_of

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("name", "case"), [(name, case) for name, case in CALLS if name != "weighted_sum"])
def test_the_numbers_contract(name: str, case: str, dtype: torch.dtype) -> None:
    assert broken(name, layout(case, dtype, CPU, columns=61)) == []


def test_how_tensors_lie_together() -> None:
    contiguous = RowLayout(0, 9, 5000)
    assert alignment_of(5000, 2, (contiguous, RowLayout(64, 9, 5008))) == "ALIGNED"
    assert alignment_of(5000, 2, (contiguous, RowLayout(64, 9, 5001))) == "SCALAR"
    assert alignment_of(5000, 2, (contiguous, RowLayout(2, 9, 5000))) == "SCALAR"
    assert alignment_of(3, 2, (RowLayout(0, 1, 3), RowLayout(0, 1, 7))) == "PEELED", "one row has no next one"
    assert alignment_of(5001, 2, (RowLayout(0, 9, 5001),) * 2) == "PEELED"
    assert alignment_of(16392, 2, (RowLayout(0, 9, 16392),)) == "PEELED", "long rows are counted from lines"
