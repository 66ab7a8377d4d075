"""Processes, threads and the tracks of slices, from the process and thread ids of the staged events."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tilewright.trace.events.rows import append, next_id
from tilewright.trace.events.staging import ASYNC_PHASES, COUNTER_PHASES, METADATA_PHASES, WIDE, Header

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_GPU = re.compile(r"GPU (\d+)")
_OF_A_PROCESS = ("process_name", "process_labels", "process_sort_index", "process_uptime_seconds")


@dataclass
class _Process:
    upid: int
    key: str
    name: str | None = None
    labels: str | None = None

    def row(self, file_id: int) -> tuple[object, ...]:
        gpu = _GPU.fullmatch(self.labels or "")
        number = _number(self.key)
        name = self.labels if gpu else self.name or (self.key or None if number is None else None)
        return self.upid, self.upid, number, name, self.labels, int(gpu[1]) if gpu else None, file_id


@dataclass
class _Thread:
    utid: int
    key: str
    process: _Process
    name: str | None = None

    def row(self) -> tuple[object, ...]:
        number = _number(self.key)
        name = self.name or (self.key or None if number is None else None)
        return self.utid, self.utid, number, name, self.process.upid, int(self.key == self.process.key)


@dataclass
class Tracks:
    """The processes, threads and tracks of one file; ids continue after those of earlier files."""

    connection: DuckDBPyConnection
    file_id: int
    processes: dict[str, _Process] = field(default_factory=dict)
    threads: dict[tuple[str, str], _Thread] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Perfetto reserves 0 for the idle thread.
        self._next_upid = max(1, next_id(self.connection, "process", "upid"))
        self._next_utid = max(1, next_id(self.connection, "thread", "utid"))
        self._next_track = next_id(self.connection, "track", "id")
        self._tracks: list[tuple[object, ...]] = []
        self._thread_tracks: list[tuple[object, ...]] = []
        self._process_tracks: list[tuple[object, ...]] = []
        self._counter_tracks: list[tuple[object, ...]] = []

    def process(self, pid: str) -> _Process:
        if pid not in self.processes:
            self.processes[pid] = _Process(self._next_upid, pid)
            self._next_upid += 1
        return self.processes[pid]

    def thread(self, pid: str, tid: str) -> _Thread:
        if (pid, tid) not in self.threads:
            self.threads[pid, tid] = _Thread(self._next_utid, tid, self.process(pid))
            self._next_utid += 1
        return self.threads[pid, tid]

    def thread_track(self, utid: int) -> int:
        number = self._track(None, "thread_execution")
        self._thread_tracks.append((number, None, utid))
        return number

    def instant_track(self, upid: int | None) -> int:
        """The track of instants of a process, or of the whole trace."""
        if upid is None:
            return self._track(None, "legacy_chrome_global_instants")
        number = self._track(None, "chrome_process_instant")
        self._process_tracks.append((number, None, upid))
        return number

    def async_track(self, upid: int, name: str | None) -> int:
        number = self._track(name, "legacy_async_process_slice")
        self._process_tracks.append((number, name, upid))
        return number

    def counter_track(self, pid: str, name: str) -> int:
        number = self._track(name, "json_counter")
        self._counter_tracks.append((number, name, None, self.process(pid).upid))
        return number

    def _track(self, name: str | None, kind: str) -> int:
        number = self._next_track
        self._next_track += 1
        self._tracks.append((number, name, kind, None))
        return number

    def find(self) -> None:
        """Find all processes and threads of the staged events, and their names from metadata events.

        Leaves table `place` (pid, tid, track_id) with a track for each thread that has events.
        """
        metadata = self.connection.execute(
            "SELECT pid, tid, name, json_extract_string(args, '$.name'), json_extract_string(args, '$.labels') "
            f"FROM event WHERE ph IN {METADATA_PHASES} ORDER BY seq"
        ).fetchall()
        for pid, tid, what, name, labels in metadata:
            process = self.process(pid)
            if what == "process_name":
                process.name = name
            elif what == "process_labels":
                process.labels = labels
            elif what == "thread_name":
                self.thread(pid, tid).name = name
            elif what not in _OF_A_PROCESS and tid:
                self.thread(pid, tid)
        without = METADATA_PHASES + COUNTER_PHASES + ASYNC_PHASES
        places = self.connection.execute(
            f"SELECT pid, tid FROM event WHERE ph NOT IN {without} AND NOT {WIDE} GROUP BY pid, tid ORDER BY min(seq)"
        ).fetchall()
        tracks = [(pid, tid, self.thread_track(self.thread(pid, tid).utid)) for pid, tid in places]
        for (pid,) in self.connection.execute(
            f"SELECT pid FROM event WHERE ph IN {COUNTER_PHASES + ASYNC_PHASES} GROUP BY pid ORDER BY min(seq)"
        ).fetchall():
            self.process(pid)
        self.connection.execute("CREATE OR REPLACE TEMP TABLE place (pid VARCHAR, tid VARCHAR, track_id BIGINT)")
        append(self.connection, "place", tracks)

    def write(self) -> None:
        """Write them to the tables of the schema."""
        append(self.connection, "process", [process.row(self.file_id) for process in self.processes.values()])
        append(self.connection, "thread", [thread.row() for thread in self.threads.values()])
        append(self.connection, "track", self._tracks)
        append(self.connection, "thread_track", self._thread_tracks)
        append(self.connection, "process_track", self._process_tracks)
        append(self.connection, "counter_track", self._counter_tracks)


def _number(key: str) -> int | None:
    """The id as a number, or None if it is not one in range."""
    if not re.fullmatch(r"-?\d{1,19}", key):
        return None
    number = int(key)
    return number if -(2**63) <= number < 2**63 else None


def add_metadata(connection: DuckDBPyConnection, tracks: Tracks, header: Header) -> int:
    """Rows of `metadata` from the header and the metadata events; returns the number of these events."""
    rows = connection.execute(
        f"SELECT pid, tid, coalesce(name, ''), args FROM event WHERE ph IN {METADATA_PHASES} ORDER BY seq"
    ).fetchall()
    first = next_id(connection, "metadata", "id")
    of_file: list[tuple[object, ...]] = [
        (name, "single", _number(value), value, None, None, tracks.file_id) for name, value in header.metadata
    ]
    of_events: list[tuple[object, ...]] = []
    for pid, tid, name, args in rows:
        thread = tracks.threads.get((pid, tid))
        utid = thread.utid if thread and name not in _OF_A_PROCESS else None
        of_events.append((name, "multi", None, args, tracks.process(pid).upid, utid, tracks.file_id))
    append(connection, "metadata", [(first + index, *row) for index, row in enumerate(of_file + of_events)])
    return len(of_events)
