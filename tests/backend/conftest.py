"""Every test starts with nothing traced and nothing said, and may choose to fall back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tilewright.records import errors


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(errors, "_warned", set())
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fall back with a line, as users have it; the other tests run strict."""
    monkeypatch.delenv("TILEWRIGHT_STRICT", raising=False)
