"""What most tests of traces begin with."""

import pytest

from tests.trace.kineto import Trace


@pytest.fixture
def trace() -> Trace:
    return Trace()
