"""Nsight Systems' SQLite export, with Kineto's names for the same events.

Tables and columns are those of "SQLite Schema Reference" in the Nsight Systems exporter documentation. The file's note
lists tables that are not read.
"""

from __future__ import annotations

import json
import re
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.records.errors import TraceError
from tilewright.store.rows import storable
from tilewright.trace.events.rows import append
from tilewright.trace.events.staging import Header

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MAGIC = b"SQLite format 3\0"
_BATCH = 50_000
_LIMIT = 2**62
_VERSIONED = re.compile(r"_v\d+$")
# NVTX_EVENTS.eventType
_MARK, _PUSH_POP, _START_END = 34, 59, 60
# CUPTI_ACTIVITY_KIND_MEMCPY.copyKind, as CUPTI numbers them
_COPIES = {1: "HtoD", 2: "DtoH", 8: "DtoD", 9: "HtoH", 10: "PtoP"}
_READ = {
    "StringIds", "CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "CUPTI_ACTIVITY_KIND_MEMCPY",
    "CUPTI_ACTIVITY_KIND_MEMSET", "NVTX_EVENTS", "OSRT_API", "PROCESSES", "ThreadNames", "TARGET_INFO_GPU",
}  # fmt: skip
_ACTIVITY = re.compile(r"CUPTI_ACTIVITY_KIND_|[A-Z]+_EVENTS$|[A-Z]+_API$")

_ACTIVITIES = ("KERNEL", "MEMCPY", "MEMSET")
_DEVICE = ("start", "end", "deviceId", "streamId", "contextId", "correlationId", "globalPid")
_TEXT_IDS = ("nameId", "demangledName", "textId")

Row = tuple[object, ...]


def is_nsys(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def stage(path: Path, connection: DuckDBPyConnection) -> Header:
    """Fill `staged` from the export at `path`.

    Raises:
        TraceError: the file is damaged, or no export of Nsight Systems.
    """
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro&immutable=1", uri=True)) as source:
            source.execute("PRAGMA trusted_schema = OFF")
            source.text_factory = lambda raw: raw.decode("utf-8", "replace")
            export = _Export(source)
            if not export.tables & (_READ - {"StringIds"}):
                raise TraceError(f"{path} is not an export of Nsight Systems: it has none of its tables")
            batch: list[Row] = []
            rejects: list[Row] = []
            for row in export.rows():
                fault = _fault(row)
                if fault:
                    rejects.append((fault, json.dumps(row, default=str)))
                else:
                    batch.append(row)
                if len(batch) >= _BATCH:
                    append(connection, "staged", batch)
                    batch = []
            append(connection, "staged", batch)
            append(connection, "event_reject", rejects)
            return export.header()
    except (sqlite3.Error, TypeError, ValueError) as error:
        raise TraceError(f"{path} cannot be read as an export of Nsight Systems: {error}") from error


class _Export:
    """An open export: its known tables as rows of `staged`."""

    def __init__(self, source: sqlite3.Connection) -> None:
        self.source = source
        self.tables = {name for (name,) in source.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        self.launched = {
            (_process(process), correlation)
            for kind in _ACTIVITIES
            for process, correlation in self._select(f"CUPTI_ACTIVITY_KIND_{kind}", "globalPid", "correlationId")
        }

    def rows(self) -> Iterator[Row]:
        yield from self._names()
        yield from self._calls()
        yield from self._kernels()
        yield from self._transfers()
        yield from self._ranges()

    def header(self) -> Header:
        left = sorted(
            table
            for table in self.tables - _READ
            if _ACTIVITY.search(table) and self.source.execute(f'SELECT 1 FROM "{table}" LIMIT 1').fetchone()
        )
        return Header(
            format="nsys",
            metadata=tuple(
                (storable(str(name)), storable(str(value)))
                for table in ("META_DATA_EXPORT", "META_DATA_CAPTURE", "TARGET_INFO_SYSTEM_ENV")
                for name, value in self._select(table, "name", "value")
            ),
            notes=(f"not read: {', '.join(left)}",) if left else (),
        )

    def _names(self) -> Iterator[Row]:
        for pid, name in self._select("PROCESSES", "pid", "name"):
            yield _staged("M", None, "process_name", str(pid), args={"name": name})
        for thread, name in self._select("ThreadNames", "globalTid", "nameId"):
            yield _staged("M", None, "thread_name", *_thread(thread), args={"name": name})
        gpus = {gpu for (gpu,) in self._select("TARGET_INFO_GPU", "id")}
        for kind in _ACTIVITIES:
            gpus |= {gpu for (gpu,) in self._select(f"CUPTI_ACTIVITY_KIND_{kind}", "deviceId")}
        for gpu in sorted(gpu for gpu in gpus if isinstance(gpu, int)):
            yield _staged("M", None, "process_labels", _device(gpu), args={"labels": _device(gpu)})

    def _calls(self) -> Iterator[Row]:
        """Calls of the host; each CUDA call that launched something also starts a flow."""
        columns = ("start", "end", "globalTid", "correlationId", "nameId")
        for start, end, thread, correlation, name in self._select("CUPTI_ACTIVITY_KIND_RUNTIME", *columns):
            plain = _VERSIONED.sub("", str(name))
            pid, tid = _thread(thread)
            category = "cuda_runtime" if plain.startswith("cuda") else "cuda_driver"
            yield _staged("X", category, plain, pid, tid, start, end, args={"correlation": correlation})
            if (pid, correlation) in self.launched:
                yield _staged("s", "ac2g", "ac2g", pid, tid, start, arrow=f"{pid}:{correlation}")
        for start, end, thread, name in self._select("OSRT_API", "start", "end", "globalTid", "nameId"):
            yield _staged("X", "osrt", name, *_thread(thread), start, end)

    def _kernels(self) -> Iterator[Row]:
        grid = ("gridX", "gridY", "gridZ", "blockX", "blockY", "blockZ")
        memory = ("registersPerThread", "staticSharedMemory", "dynamicSharedMemory")
        for *activity, name, x, y, z, bx, by, bz, registers, static, dynamic in self._select(
            "CUPTI_ACTIVITY_KIND_KERNEL", *_DEVICE, "demangledName", *grid, *memory
        ):
            yield from _on_device("kernel", name, activity, {
                "registers per thread": registers,
                "shared memory": (static or 0) + (dynamic or 0),
                "grid": [x, y, z],
                "block": [bx, by, bz],
            })  # fmt: skip

    def _transfers(self) -> Iterator[Row]:
        for *activity, nbytes, kind in self._select("CUPTI_ACTIVITY_KIND_MEMCPY", *_DEVICE, "bytes", "copyKind"):
            yield from _on_device("gpu_memcpy", f"Memcpy {_COPIES.get(kind, kind)}", activity, {"bytes": nbytes})
        for *activity, nbytes in self._select("CUPTI_ACTIVITY_KIND_MEMSET", *_DEVICE, "bytes"):
            yield from _on_device("gpu_memset", "Memset (Device)", activity, {"bytes": nbytes})

    def _ranges(self) -> Iterator[Row]:
        """NVTX marks, ranges of a thread, and ranges across threads, as Kineto's user annotations."""
        columns = ("start", "end", "eventType", "rangeId", "globalTid", "text", "textId")
        for start, end, kind, number, thread, text, registered in self._select("NVTX_EVENTS", *columns):
            name, (pid, tid) = text if text is not None else registered, _thread(thread)
            if kind == _MARK:
                yield _staged("i", "user_annotation", name, pid, tid, start)
            elif kind == _PUSH_POP:
                yield _staged("X" if end is not None else "B", "user_annotation", name, pid, tid, start, end)
            elif kind == _START_END:
                yield _staged("b", "user_annotation", name, pid, tid, start, arrow=str(number))
                if end is not None:
                    yield _staged("e", "user_annotation", name, pid, tid, end, arrow=str(number))

    def _select(self, table: str, *columns: str) -> Iterator[Any]:
        """Rows of a table, none if it is missing; NULL for a missing column, text for a string id."""
        if table not in self.tables:
            return iter(())
        there = {row[1] for row in self.source.execute(f'PRAGMA table_info("{table}")')}
        fields = []
        for column in columns:
            if column not in there:
                fields.append("NULL")
            elif column in _TEXT_IDS and "StringIds" in self.tables:
                fields.append(f'(SELECT value FROM StringIds WHERE id = "{table}"."{column}")')
            else:
                fields.append(f'"{column}"')
        return iter(self.source.execute(f'SELECT {", ".join(fields)} FROM "{table}"'))


def _on_device(category: str, name: object, activity: Sequence[Any], args: dict[str, object]) -> Iterator[Row]:
    """An activity on a stream, and the end of its launch's flow."""
    start, end, device, stream, context, correlation, process = activity
    given = {"device": device, "context": context, "stream": stream, "correlation": correlation, **args}
    yield _staged("X", category, name, _device(device), str(stream), start, end, args=given)
    if correlation:
        arrow = f"{_process(process)}:{correlation}"
        yield _staged("f", "ac2g", "ac2g", _device(device), str(stream), start, arrow=arrow)


def _device(number: object) -> str:
    """The process id of a GPU's events: text, since the host's process may have any number, 1 in a container."""
    return f"GPU {number}" if isinstance(number, int) else "a GPU"


def _staged(
    phase: str, category: str | None, name: object, pid: str, tid: str = "", start: int | None = None,
    end: int | None = None, *, arrow: str | None = None, args: dict[str, object] | None = None,
) -> Row:  # fmt: skip
    # Values that are not numbers are rejected later, with their row.
    dur = end - start if phase == "X" and isinstance(start, int) and isinstance(end, int) else None
    text = None if name is None else storable(str(name))
    given = None if args is None else storable(json.dumps(args))
    return 0, phase, category, text, pid, tid, start, dur, arrow, "e" if phase == "f" else None, None, given


def _fault(row: Row) -> str | None:
    """Why a row is not a valid event, or None; SQLite accepts any value in any column."""
    _, phase, _, _, _, _, ts, dur, *_ = row
    if phase == "M":
        return None
    if not isinstance(ts, int) or (phase == "X" and not isinstance(dur, int)):
        return "start or end is missing or not an integer"
    if abs(ts) >= _LIMIT or (isinstance(dur, int) and not 0 <= dur < _LIMIT):
        return "start or end is out of range"
    return None


def _thread(identity: int | None) -> tuple[str, str]:
    """Process and thread: 24 bits each, the lowest of `globalTid`."""
    return _process(identity), str((identity or 0) & 0xFFFFFF)


def _process(identity: int | None) -> str:
    return str((identity or 0) >> 24 & 0xFFFFFF)
