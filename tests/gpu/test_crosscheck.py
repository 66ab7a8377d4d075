"""A call that no CUDA graph can hold leaves the process as it was."""

from __future__ import annotations

import pytest
import torch

from tilewright.measure.timing.crosscheck import replay_us
from tilewright.measure.timing.stopwatch import CudaStopwatch

pytestmark = pytest.mark.gpu


def test_a_capture_that_breaks_off_leaves_the_generator_free() -> None:
    x = torch.rand(1000, device="cuda")
    torch.cuda.manual_seed(3)
    wanted = torch.rand(5, device="cuda")
    torch.cuda.manual_seed(3)

    def synchronises() -> float:
        return float(x.sum())

    assert replay_us(synchronises, CudaStopwatch("cuda")) is None
    assert torch.equal(torch.rand(5, device="cuda"), wanted)
