"""What most tests of traces begin with."""

from __future__ import annotations

import pytest

from tests.trace.kineto import Trace


@pytest.fixture
def trace() -> Trace:
    return Trace()
