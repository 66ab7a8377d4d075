"""What tests of compiled models on a GPU share."""

import pytest
import torch

from tilewright.backend import backend


@pytest.fixture(scope="session", autouse=True)
def registered() -> None:
    """The backend by its name, where the package is not installed."""
    if "tilewright" not in torch._dynamo.list_backends():
        torch._dynamo.register_backend(backend, name="tilewright")
