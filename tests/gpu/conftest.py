"""What tests of compiled models on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def afresh() -> Iterator[None]:
    """Nothing compiled before, and one state of the generators."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()
