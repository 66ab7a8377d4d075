"""A few operators of PyTorch's database, as `op_db.py` counts them whole."""

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db

from tests.operators.op_db import check

RIGHT = ("atanh", "sinc", "trace", "cummax", "put", "fft_rfft")


@pytest.mark.parametrize("name", RIGHT)
def test_samples_are_right_and_have_rows(name: str) -> None:
    (op,) = (op for op in op_db if op.formatted_name == name)
    outcome = check(op, torch.float32, count=1)
    assert (outcome.status, outcome.rowless) == ("right", ()), outcome
