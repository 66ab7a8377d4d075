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

from tests.trace.kineto import HOST, Trace
from tilewright.records.errors import StoreError
from tilewright.store import query
from tilewright.trace import trace_run

FIXTURES = Path(__file__).parent / "fixtures"
TRACES = {"eager_step": "eager_step.json.gz", "phases": "phases.json"}
ANSWERS: dict[str, list[list[object]]] = json.loads((FIXTURES / "perfetto_answers.json").read_text())
QUERIES = re.findall(
    r"^-- (\w+) (\w+)\n(.*?)(?=\n\n-- |\s*\Z)", (FIXTURES / "perfetto_queries.sql").read_text(), re.M | re.S
)

DOCUMENTED = re.findall(
    r"^-- ([\w '-]+)\n((?:(?!--).*\n?)+?)-- ([=!]) (.*)$", (FIXTURES / "perfetto_documentation.sql").read_text(), re.M
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
    ],
    ids=["double quotes for text", "a column that is not grouped"],
)
def test_what_the_dialect_refuses(runs: Runs, sql: str) -> None:
    """docs/trace.md lists these; none of them may pass with another meaning."""
    with pytest.raises(Exception, match="refuses the query"):
        query(runs["eager_step"], sql)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Two steps of a product, with an allocation in it, a launch, a kernel, a counter and an instant."""
    patch = pytest.MonkeyPatch()
    patch.setenv("TILEWRIGHT_HOME", str(tmp_path_factory.mktemp("home")))
    trace = Trace()
    trace.header["baseTimeNanoseconds"] = 1_700_000_000_000_000_000
    for at in (0, 100):
        trace.step(at // 100, at, at + 100)
        trace.operator("aten::mm", at + 10, at + 40)
        trace.operator("aten::empty", at + 12, at + 14)
        trace.launch(at + 20, at + 30, at + 60)
        trace.events.append(
            {
                "ph": "C",
                "name": "mem.swap",
                "pid": trace.pid,
                "tid": 0,
                "ts": 1005 + at,
                "args": {"value": 900 + 6 * at},
            }
        )
    trace.slice("cpu_op", "aten::tick", 55, 55)
    trace.flow("fwdbwd", 1, (10, HOST), (110, HOST))
    yield trace_run([trace.write(tmp_path_factory.mktemp("trace"))], command="x", tell=lambda _: None)[0]
    patch.undo()


@pytest.mark.parametrize(("name", "sql", "kind", "answer"), DOCUMENTED, ids=[name for name, *_ in DOCUMENTED])
def test_what_the_documentation_shows(small: Path, name: str, sql: str, kind: str, answer: str) -> None:
    if kind == "!":
        with pytest.raises(StoreError, match=re.escape(answer)):
            query(small, sql)
    else:
        assert [list(row) for row in query(small, sql)[1]] == json.loads(answer)


def test_what_a_query_makes_is_gone_with_it(small: Path) -> None:
    query(small, "CREATE TABLE sub AS SELECT 1 AS x; SELECT x FROM sub")
    for refused in ("FROM sub", "DROP TABLE step", "INSERT INTO step SELECT * FROM step", "CREATE TABLE made (x INT)"):
        with pytest.raises(StoreError, match="refuses the query"):
            query(small, refused)


def test_like_tells_cases_apart(runs: Runs) -> None:
    assert query(runs["eager_step"], "SELECT count(*) FROM slice WHERE name LIKE 'ATEN::%'")[1] == [(0,)]


def test_the_run_needs_no_setting(runs: Runs) -> None:
    """Views and macros lie in the file, so that any DuckDB opens it."""
    with duckdb.connect(str(runs["eager_step"]), read_only=True) as connection:
        row = connection.execute("SELECT count(*), trace_dur() FROM thread_slice").fetchone()
    assert row is not None and row[0] > 2000 and row[1] > 10_000_000
