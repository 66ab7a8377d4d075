"""Fixtures of most trace tests."""

import pytest

from tests.trace.kineto import Trace


@pytest.fixture
def trace() -> Trace:
    return Trace()
