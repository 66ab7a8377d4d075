"""Random calls of the kernels keep the numbers contract: any layout, any options of attention.

`TILEWRIGHT_FUZZ_CALLS` says how many of each (10 unless told). They are the same at every run; a failure names its
number.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.fuzz.calls import attention, broken
from tests.kernels.attention.calls import wrong

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
CALLS = int(os.environ.get("TILEWRIGHT_FUZZ_CALLS") or 10)
TOGETHER = 5


@pytest.mark.parametrize("first", range(0, CALLS, TOGETHER))
def test_operators(first: int) -> None:
    found = {number: broken(number, GPU) for number in range(first, min(first + TOGETHER, CALLS))}
    assert {number: call for number, call in found.items() if call[1]} == {}


@pytest.mark.parametrize("first", range(0, CALLS, TOGETHER))
def test_attention(first: int) -> None:
    found = {number: wrong(attention(number), GPU, number) for number in range(first, min(first + TOGETHER, CALLS))}
    assert {(number, str(attention(number))): rows for number, rows in found.items() if rows} == {}
