"""Helpers of the loading tests: traces from lists of events, and a database that holds one."""

import json
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import duckdb

from tilewright.trace import Loaded, load_traces

Event = Mapping[str, object]
Rows = list[tuple[Any, ...]]


def complete(name: str, ts: float, dur: float, tid: object = 1, pid: object = 1, **more: object) -> dict[str, object]:
    return {"ph": "X", "cat": "op", "name": name, "pid": pid, "tid": tid, "ts": ts, "dur": dur, **more}


def written(path: Path, events: Iterable[Event], **header: object) -> Path:
    path.write_text(json.dumps(header | {"traceEvents": list(events)}))
    return path


def loaded(*paths: Path) -> tuple[duckdb.DuckDBPyConnection, list[Loaded]]:
    connection = duckdb.connect()
    return connection, load_traces(paths, connection)


def loaded_events(events: Iterable[Event], **header: object) -> tuple[duckdb.DuckDBPyConnection, Loaded]:
    """A database with a trace of these events, and what became of them."""
    with tempfile.TemporaryDirectory() as folder:
        connection, (file,) = loaded(written(Path(folder) / "trace.json", events, **header))
    return connection, file


def rows(connection: duckdb.DuckDBPyConnection, sql: str) -> Rows:
    return connection.execute(sql).fetchall()


def accounted(file: Loaded) -> int:
    """Every event of a file is one of these."""
    return file.slices + file.paired + file.flow_points + file.counters + file.metadata + file.rejects
