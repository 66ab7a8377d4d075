"""Random calls of the operators keep the numbers contract: results and gradients, in any layout, on a CPU.

`TILEWRIGHT_FUZZ_CALLS` says how many (200 unless told). They are the same at every run; a failure names its number.
Of many more, some have a true gradient of nearly zero (all logits equal, one column), which none but luck gives.
"""

from __future__ import annotations

import os

import pytest
import torch

from tests.fuzz.calls import broken

CALLS = int(os.environ.get("TILEWRIGHT_FUZZ_CALLS") or 200)
TOGETHER = 50


@pytest.mark.parametrize("first", range(0, CALLS, TOGETHER))
def test_random_calls(first: int) -> None:
    found = {number: broken(number, torch.device("cpu")) for number in range(first, min(first + TOGETHER, CALLS))}
    assert {number: call for number, call in found.items() if call[1]} == {}
