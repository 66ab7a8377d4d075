"""Fixtures for tests of compiled models on a GPU."""

import pytest
import torch

from tilewright.backend import backend


# Before pytest-xdist reads the groups.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One process runs what takes much memory, one what shares a fixture that compiles every operator."""
    for item in items:
        if item.name.partition("[")[0].endswith(("_bits", "_count", "_keys")):
            item.add_marker(pytest.mark.xdist_group("memory"))
        elif "checked" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.xdist_group("operators"))


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    """The backend by its name, where the package is not installed."""
    if "tilewright" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(backend, name="tilewright")
