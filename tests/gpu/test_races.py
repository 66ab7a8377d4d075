"""Attention is raced on a GPU."""

import pytest
import torch

from tilewright.choose.attention_race import Raced, races_of
from tilewright.kernels.attention.request import Request
from tilewright.kernels.offer import THEIRS
from tilewright.passes.attention.library import CUDNN, FLASH, OWN

pytestmark = pytest.mark.gpu


def test_a_race_with_one_key_asks_no_library_that_would_crash() -> None:
    """cuDNN's backward of one key does, in PyTorch 2.11."""
    lies = torch.empty(1, 2, 1, 160).stride()
    request = Request(
        torch.device("cuda:0"), torch.float16, 1, 2, 2, 1, 1, 160, 160, lies, lies, lies, True, 0.1, None, 0
    )  # fmt: skip
    raced = Raced(request, FLASH, causal=True, bias=None, training=True, others=(OWN, CUDNN))
    for race in races_of(raced):
        found = race.outcome()
        assert found is not None and found.times_us.keys() == {THEIRS, OWN.name}
