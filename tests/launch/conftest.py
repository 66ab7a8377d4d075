"""The executor's C++ module, and the driver that calls Python functions in place of a GPU's."""

from collections.abc import Iterator
from types import ModuleType

import pytest

from tests.launch.driver import FakeDriver
from tilewright.launch import driver, twin
from tilewright.launch.executor import EXTENSION


@pytest.fixture(scope="session")
def module() -> ModuleType:
    return EXTENSION.load(EXTENSION.built())


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    made = FakeDriver()
    monkeypatch.setattr(driver, "table", lambda device: made.table)
    twin._calls.cache_clear()
    yield made
    twin._calls.cache_clear()
