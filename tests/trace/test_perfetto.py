"""Queries written for Perfetto run unchanged and give what Perfetto's own trace processor gives.

Its answers are recorded by `perfetto_answers.mjs`.
"""

import json
import math
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import duckdb
import pytest

from tests.trace.kineto import HOST, Analysis, Trace
from tests.trace.loading import accounted, loaded, rows
from tilewright.records.errors import StoreError, TraceError
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


EXPORT = Path(__file__).parent / "fixtures" / "nsys.sql"
TID = 4250


@contextmanager
def changed(path: Path) -> Iterator[sqlite3.Connection]:
    with closing(sqlite3.connect(path)) as made, made:
        yield made


@pytest.fixture
def export(tmp_path: Path) -> Path:
    path = tmp_path / "report.sqlite"
    with changed(path) as made:
        made.executescript(EXPORT.read_text())
    return path


def test_export(export: Path) -> None:
    connection, (file,) = loaded(export)
    assert file.format == "nsys" and file.events == accounted(file)
    assert file.note == "not read: CUDNN_EVENTS"
    assert rows(
        connection,
        "SELECT category, s.name, ts, dur, process.name, tid FROM slice s JOIN thread_track t ON t.id = track_id "
        "JOIN thread USING (utid) JOIN process USING (upid) ORDER BY ts, dur DESC",
    ) == [
        ("user_annotation", "forward", 50, 550, "python3", TID),
        ("user_annotation", "a mark", 60, 0, "python3", TID),
        ("user_annotation", "never popped", 95, -1, "python3", TID),
        ("cuda_runtime", "cudaLaunchKernel", 100, 100, "python3", TID),
        ("cuda_driver", "cuLaunchKernel", 300, 80, "python3", TID),
        ("cuda_runtime", "cudaMemcpyAsync", 500, 400, "python3", TID),
        ("cuda_runtime", "cudaDeviceSynchronize", 900, 90, "python3", TID),
        ("kernel", "void gemm<float>(int)", 1000, 1000, "GPU 0", 7),
        ("kernel", "void gemm<float>(int)", 2000, 600, "GPU 0", 7),
        ("gpu_memcpy", "Memcpy DtoH", 2700, 200, "GPU 0", 7),
        ("gpu_memset", "Memset (Device)", 3000, 10, "GPU 0", 7),
    ]
    assert rows(connection, "SELECT s.name, dur FROM slice s JOIN process_track t ON t.id = track_id") == [
        ("from here to there", 10)
    ]
    assert rows(
        connection,
        "SELECT a.name, b.name FROM flow JOIN slice a ON a.id = slice_out "
        "JOIN slice b ON b.id = slice_in ORDER BY a.ts",
    ) == [
        ("cudaLaunchKernel", "void gemm<float>(int)"),
        ("cuLaunchKernel", "void gemm<float>(int)"),
        ("cudaMemcpyAsync", "Memcpy DtoH"),
    ]
    assert rows(
        connection,
        "SELECT EXTRACT_ARG(arg_set_id, 'args.grid[0]'), EXTRACT_ARG(arg_set_id, 'args.shared memory'), "
        "EXTRACT_ARG(arg_set_id, 'args.registers per thread') FROM slice WHERE category = 'kernel' LIMIT 1",
    ) == [("132", "1040", "32")]
    assert rows(connection, "SELECT reason FROM reject") == [("a flow event whose other end is missing",)]
    assert rows(connection, "SELECT str_value FROM metadata WHERE name = 'EXPORT_SCHEMA_VERSION'") == [("3.15.1",)]


def test_gpus_have_their_names_whatever_the_processes_are_called(export: Path) -> None:
    """In a container the first process is 1, and an export may not list its GPUs."""
    with changed(export) as made:
        made.execute("INSERT INTO PROCESSES VALUES (?, 1, 'dumb-init')", (1 << 24,))
        made.execute("DELETE FROM TARGET_INFO_GPU")
        made.execute("UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET deviceId = 1 WHERE correlationId = 2")
    connection, _ = loaded(export)
    found = rows(connection, "SELECT name, device FROM process WHERE device IS NOT NULL ORDER BY device")
    assert found == [("GPU 0", 0), ("GPU 1", 1)]
    assert rows(connection, "SELECT name FROM process WHERE pid = 1") == [("dumb-init",)]


def test_the_start_of_cuda_has_its_call(export: Path) -> None:
    """Its 800 ms before the first kernel belong to the call that the host was in."""
    with changed(export) as made:
        made.execute("INSERT INTO StringIds VALUES (9, 'cudaDeviceGetStreamPriorityRange_v5050')")
        made.execute(
            """INSERT INTO CUPTI_ACTIVITY_KIND_RUNTIME
               SELECT -800000000, -1000, eventClass, globalTid, 9, 9, 0, NULL
               FROM CUPTI_ACTIVITY_KIND_RUNTIME WHERE correlationId = 1"""
        )
    analysis = Analysis([export])
    found = analysis.rows(
        "SELECT class, name, t.dur FROM device_time t JOIN slice ON slice.id = cause WHERE class = 'idle' LIMIT 1",
    )
    assert found == [("idle", "cudaDeviceGetStreamPriorityRange", 800_001_000)]


def test_older_exports_lack_tables_and_columns(tmp_path: Path) -> None:
    path = tmp_path / "old.sqlite"
    with changed(path) as made:
        made.execute("CREATE TABLE NVTX_EVENTS (start INTEGER, end INTEGER, eventType INTEGER, text TEXT)")
        made.execute("INSERT INTO NVTX_EVENTS VALUES (1, 5, 59, 'step')")
    connection, _ = loaded(path)
    assert rows(connection, "SELECT name, dur FROM slice") == [("step", 4)]


def test_other_databases_and_damage(export: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with changed(other) as made:
        made.execute("CREATE TABLE StringIds (id, value)")
    with pytest.raises(TraceError, match="is not an export of Nsight Systems"):
        loaded(other)
    export.write_bytes(export.read_bytes()[:5000])
    with pytest.raises(TraceError, match=r"report\.sqlite"):
        loaded(export)


@pytest.mark.parametrize("value", ["'text'", "NULL", "1e300", "9223372036854775807", "x'00ff'", "5"])
def test_values_of_the_wrong_kind(export: Path, value: str) -> None:
    """SQLite takes any value in any column; an event less, then, never a wrong one."""
    with changed(export) as made:
        made.execute("CREATE TABLE loose AS SELECT * FROM CUPTI_ACTIVITY_KIND_KERNEL")
        made.execute("DROP TABLE CUPTI_ACTIVITY_KIND_KERNEL")
        made.execute("ALTER TABLE loose RENAME TO CUPTI_ACTIVITY_KIND_KERNEL")
        made.execute(f"UPDATE CUPTI_ACTIVITY_KIND_KERNEL SET end = {value} WHERE correlationId = 1")
    connection, (file,) = loaded(export)
    assert rows(connection, "SELECT dur FROM slice WHERE category = 'kernel'") == [(600,)]
    assert rows(connection, "SELECT count(*) FROM reject WHERE reason LIKE 'start or end%'") == [(1,)]
    assert file.events == accounted(file)
