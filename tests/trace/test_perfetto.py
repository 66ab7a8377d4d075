"""Queries written for Perfetto run unchanged and give what Perfetto's own trace processor gives.

Its answers are recorded by `perfetto_answers.mjs`.
"""

import json
import math
import re
from collections.abc import Iterator
from pathlib import Path

import duckdb
import pytest

from tilewright.store import query
from tilewright.trace import trace_run

FIXTURES = Path(__file__).parent / "fixtures"
TRACES = {"eager_step": "eager_step.json.gz", "phases": "phases.json"}
ANSWERS: dict[str, list[list[object]]] = json.loads((FIXTURES / "perfetto_answers.json").read_text())
QUERIES = re.findall(
    r"^-- (\w+) (\w+)\n(.*?)(?=\n\n-- |\s*\Z)", (FIXTURES / "perfetto_queries.sql").read_text(), re.M | re.S
)


class Runs(dict[str, Path]):
    """The run of each trace, loaded at first use."""

    def __missing__(self, name: str) -> Path:
        self[name], _ = trace_run([FIXTURES / TRACES[name]], command="tilewright trace", tell=lambda _: None)
        return self[name]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    patch = pytest.MonkeyPatch()
    patch.setenv("TILEWRIGHT_HOME", str(tmp_path_factory.mktemp("home")))
    yield Runs()
    patch.undo()


def test_there_are_thirty() -> None:
    assert len(QUERIES) == len(ANSWERS) >= 30


@pytest.mark.parametrize(("name", "trace", "sql"), QUERIES, ids=[name for name, _, _ in QUERIES])
def test_same_answer(runs: Runs, name: str, trace: str, sql: str) -> None:
    _, rows = query(runs[trace], sql)
    expected = ANSWERS[name]
    assert len(rows) == len(expected)
    for row, right in zip(rows, expected, strict=True):
        assert len(row) == len(right)
        assert all(map(_same, row, right)), f"{row} instead of {right}"


def _same(ours: object, theirs: object) -> bool:
    """Equal; sums of doubles up to rounding; numbers that EXTRACT_ARG gives as text by their value."""
    if ours == theirs or ours is None or theirs is None:
        return ours == theirs
    if isinstance(theirs, str):
        return False
    return math.isclose(float(str(ours)), float(str(theirs)), rel_tol=1e-12)


@pytest.mark.parametrize(
    "sql",
    [
        'SELECT count(*) FROM slice WHERE name = "aten::add"',
        "SELECT name, max(dur) FROM slice",
        "INCLUDE PERFETTO MODULE slices.with_context",
    ],
    ids=["double quotes for text", "a column that is not grouped", "modules"],
)
def test_what_the_dialect_refuses(runs: Runs, sql: str) -> None:
    """docs/trace.md lists these; none of them may pass with another meaning."""
    with pytest.raises(Exception, match="refuses the query"):
        query(runs["eager_step"], sql)


def test_like_tells_cases_apart(runs: Runs) -> None:
    assert query(runs["eager_step"], "SELECT count(*) FROM slice WHERE name LIKE 'ATEN::%'")[1] == [(0,)]


def test_the_run_needs_no_setting(runs: Runs) -> None:
    """Views and macros lie in the file, so that any DuckDB opens it."""
    with duckdb.connect(str(runs["eager_step"]), read_only=True) as connection:
        row = connection.execute("SELECT count(*), trace_dur() FROM thread_slice").fetchone()
    assert row is not None and row[0] > 2000 and row[1] > 10_000_000
