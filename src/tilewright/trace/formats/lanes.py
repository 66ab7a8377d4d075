"""The tracks of Perfetto's own format, threads and others; a packet may describe a track after its use."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tilewright.trace.events.rows import append
from tilewright.trace.formats.track_event import decoded

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

# Longest chain of parents, a bound for cyclic ones.
_HIGHEST = 100
_UNITS = {1: "ns", 2: "count", 3: "bytes"}

Place = tuple[str, str]
"""`pid` and `tid` of a staged event."""


@dataclass(frozen=True)
class Counter:
    """The encoding of a counter's values."""

    is_incremental: bool = False
    unit: int = 1


class Lanes:
    """Tracks by their uuid."""

    def __init__(self) -> None:
        self._described: dict[int, Any] = {}
        self._placed: dict[int, Place] = {}
        self._names: dict[int, str] = {}
        self._processes: dict[int, str | None] = {}
        self._threads: dict[tuple[int, int], str | None] = {}

    def describe(self, track: Any) -> None:
        """Add a description of a track, merged with earlier ones."""
        if track.uuid in self._described:
            self._described[track.uuid].MergeFrom(track)
        else:
            self._described[track.uuid] = track
        if track.HasField("process"):
            _name(self._processes, track.process.pid, track.process.process_name)
        if track.HasField("thread"):
            _name(self._processes, track.thread.pid, None)
            _name(self._threads, (track.thread.pid, track.thread.tid), track.thread.thread_name)

    def add_processes(self, tree: Any) -> None:
        for process in tree.processes:
            _name(self._processes, process.pid, process.cmdline[0] if process.cmdline else None)
        for thread in tree.threads:
            _name(self._threads, (thread.tgid, thread.tid), thread.name)

    def counter(self, uuid: int) -> Counter:
        track = self._described.get(uuid)
        if track is None or not track.HasField("counter"):
            return Counter()
        return Counter(track.counter.is_incremental, track.counter.unit_multiplier or 1)

    def place(self, uuid: int, event: str | None) -> Place:
        """The (pid, tid) of an event of that track; an unnamed track gets the name of its first event."""
        if uuid not in self._placed:
            self._placed[uuid] = self._place(uuid)
            self._names[uuid] = event or "" if uuid else "Default Track"
        return self._placed[uuid]

    def _place(self, uuid: int) -> Place:
        track = self._described.get(uuid)
        if track is not None and track.HasField("thread"):
            return str(track.thread.pid), str(track.thread.tid)
        return "", f"track {uuid}"

    def described(self) -> list[tuple[object, ...]]:
        """The names of processes and threads, as metadata events."""
        named = [("process_name", str(pid), "", name) for pid, name in self._processes.items()]
        named += [("thread_name", str(pid), str(tid), name) for (pid, tid), name in self._threads.items()]
        return [
            (0, "M", None, what, pid, tid, *(None,) * 5, None if name is None else json.dumps({"name": name}))
            for what, pid, tid, name in named
        ]

    def write(self, connection: DuckDBPyConnection) -> None:
        """Fill `lane`, and move the staged events of threads that were described after their use."""
        late = [(self._placed[uuid][1], *self._place(uuid)) for uuid in self._placed if self._moved(uuid)]
        if late:
            connection.execute("CREATE OR REPLACE TEMP TABLE late (was VARCHAR, pid VARCHAR, tid VARCHAR)")
            append(connection, "late", late)
            connection.execute(
                "UPDATE staged SET pid = late.pid, tid = late.tid FROM late "
                "WHERE staged.pid = '' AND staged.tid = late.was"
            )
            connection.execute("DROP TABLE late")
        rows = [self._row(uuid) for uuid, (pid, _) in self._placed.items() if not pid and not self._moved(uuid)]
        append(connection, "lane", rows)

    def _moved(self, uuid: int) -> bool:
        return self._placed[uuid] != self._place(uuid)

    def _row(self, uuid: int) -> tuple[object, ...]:
        track = self._described.get(uuid)
        pid, tid = self._owner(uuid)
        name = unit = None
        if track is not None:
            name = decoded(getattr(track, track.WhichOneof("static_or_dynamic_name") or "name"))
            unit = decoded(track.counter.unit_name) or _UNITS.get(track.counter.unit)
        if not name and (track is None or not track.HasField("process")):
            name = self._names[uuid]
        return f"track {uuid}", name or None, unit, pid, tid

    def _owner(self, uuid: int) -> tuple[str | None, str | None]:
        """The process, and the thread if any, above a track."""
        for _ in range(_HIGHEST):
            track = self._described.get(uuid)
            if track is None:
                break
            if track.HasField("thread"):
                return str(track.thread.pid), str(track.thread.tid)
            if track.HasField("process"):
                return str(track.process.pid), None
            uuid = track.parent_uuid
        return None, None


def _name(names: dict[Any, str | None], key: Any, name: str | bytes | None) -> None:
    """Set a name, unless the new description has none."""
    names[key] = decoded(name) if name else names.get(key)
