"""What every test shares: strict mode, a home of its own, and a reason where there is no GPU."""

from __future__ import annotations

import os
import tempfile

import pytest

_HOME = pytest.StashKey[tempfile.TemporaryDirectory[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Falling back is an error, and nothing is read from or left in the user's own files.

    Workers of pytest-xdist inherit the environment, so only the process that starts them sets it.
    """
    if hasattr(config, "workerinput"):
        return
    config.stash[_HOME] = tempfile.TemporaryDirectory(prefix="tilewright-tests-")
    os.environ["TILEWRIGHT_HOME"] = config.stash[_HOME].name
    os.environ["TILEWRIGHT_STRICT"] = "1"
    # PyTorch's profiler reads this once a process; without it every later recording prints two lines.
    os.environ["KINETO_LOG_LEVEL"] = "6"


def pytest_unconfigure(config: pytest.Config) -> None:
    if _HOME in config.stash:
        config.stash[_HOME].cleanup()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not on_gpu:
        return
    import torch

    if not torch.cuda.is_available():
        reason = f"needs a CUDA device; torch {torch.__version__} finds none"
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))
