"""Fixtures of the page tests: a browser, and a recorded training step with every analysis."""

from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from tests.report.browser import Browser
from tests.trace.training_trace import load
from tilewright.trace.analysis import analyse


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as browser:
        yield browser


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of three training steps of a Transformer block as an H200 ran them."""
    fixture = Path(__file__).parents[1] / "trace" / "fixtures" / "block_eager.json.gz"
    path = load(fixture, tmp_path_factory.mktemp("recorded") / "run.duckdb")
    with duckdb.connect(str(path)) as connection:
        analyse(connection)
    return path
