"""Builds nested slices from staged events, and the arrays to which flows bind."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import numpy as np

from tilewright.trace.events.nesting import NestedSlices, nest
from tilewright.trace.events.pairing import Event, Paired, pair
from tilewright.trace.events.rows import Ints, fetch, next_id
from tilewright.trace.events.staging import ASYNC_PHASES, NESTED_PHASES, ROW, SLICE_PHASES, WIDE
from tilewright.trace.events.tracks import Tracks

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_NEVER_BEGAN = "an end without a begin"


@dataclass(frozen=True)
class UnnestedSlices:
    """Slices before nesting: int64[n] arrays in the order of the file; and the number of paired ends."""

    seq: Ints
    track: Ints
    ts: Ints
    dur: Ints
    first_id: int
    paired: int

    def nested(self) -> Slices:
        """Their nest, and ids from `first_id` on."""
        nested = nest(self.track, self.ts, self.dur)
        ids = _ids(nested, self.first_id, self.seq)
        return Slices(nested, ids, self.seq[nested.order], self.dur[nested.order], self.paired)


@dataclass(frozen=True)
class Slices:
    """The nest of a file, with the id in table `slice`, the seq of the event and the duration of each slice."""

    nest: NestedSlices
    ids: Ints
    seq: Ints
    dur: Ints
    paired: int


def find_slices(connection: DuckDBPyConnection, tracks: Tracks) -> UnnestedSlices:
    """The slices of the staged events, begins and ends paired; creates missing tracks."""
    whole = fetch(
        connection,
        "SELECT seq, track_id, ts, coalesce(dur, 0) FROM event JOIN place USING (pid, tid) "
        f"WHERE ph IN {SLICE_PHASES} AND NOT {WIDE}",
    )
    parts = [whole, _wide_instants(connection, tracks)]
    paired = _pair(connection, tracks)
    for pairs in paired:
        columns = pairs.seq, [cast("int", place) for place in pairs.place], pairs.ts, pairs.dur
        parts.append([np.asarray(column, np.int64) for column in columns])
    seq, track, ts, dur = (np.concatenate(column) for column in zip(*parts, strict=True))
    # Parts of a file that were read in parallel are interleaved.
    if len(seq) and (np.diff(seq) < 0).any():
        by_seq = np.argsort(seq, kind="stable")
        seq, track, ts, dur = seq[by_seq], track[by_seq], ts[by_seq], dur[by_seq]
    return UnnestedSlices(
        seq, track, ts, dur, next_id(connection, "slice", "id"), sum(len(pairs.ends) for pairs in paired)
    )


def _wide_instants(connection: DuckDBPyConnection, tracks: Tracks) -> list[Ints]:
    """Instants of a process or of the whole trace: a track per process, and one for the trace."""
    rows = connection.execute(f"SELECT seq, ts, pid, scope FROM event WHERE {WIDE}").fetchall()
    made: dict[str | None, int] = {}
    seq, track, ts = [], [], []
    for number, when, pid, scope in rows:
        key = pid if scope == "p" else None
        if key not in made:
            made[key] = tracks.instant_track(None if key is None else tracks.process(key).upid)
        seq.append(number)
        track.append(made[key])
        ts.append(when)
    return [np.asarray(column, np.int64) for column in (seq, track, ts, [0] * len(seq))]


def _pair(connection: DuckDBPyConnection, tracks: Tracks) -> list[Paired]:
    """Pair begin and end events of threads, and of asynchronous ids, which get a track each."""
    threads: list[Event] = connection.execute(
        "SELECT seq, ph, track_id, ts, category, name FROM event JOIN place USING (pid, tid) "
        f"WHERE ph IN {NESTED_PHASES} ORDER BY ts, seq"
    ).fetchall()
    asynchronous = connection.execute(
        f"SELECT seq, ph, pid, id, ts, category, name FROM event WHERE ph IN {ASYNC_PHASES} ORDER BY ts, seq"
    ).fetchall()
    made: dict[object, int] = {}
    events: list[Event] = []
    for seq, phase, pid, identity, ts, category, name in asynchronous:
        # The older kind has one open slice per name; the newer nests, and its ends may lack a name.
        key = (pid, identity, category, name if phase in "STpF" else None)
        if key not in made:
            made[key] = tracks.async_track(tracks.process(pid).upid, name)
        events.append((seq, phase, made[key], ts, category, name))
    paired = [pair(threads, "B", "E"), pair(events, ("b", "S"), ("e", "F"))]
    unmatched = [seq for pairs in paired for seq in pairs.unmatched]
    reject(connection, np.asarray(unmatched, np.int64), _NEVER_BEGAN)
    _merge_arguments(connection, [ends for pairs in paired for ends in pairs.ends])
    return paired


def reject(connection: DuckDBPyConnection, seq: Ints, reason: str) -> None:
    """Write staged events to `reject`."""
    if not len(seq):
        return
    lost = {"seq": seq}  # noqa: F841  # DuckDB finds it by its name
    connection.execute(
        """
        INSERT INTO event_reject
        SELECT ?, to_json({ph: ph, cat: category, name: name, pid: pid, tid: tid, ts: ts / 1000.0, dur: dur / 1000.0,
                           id: id, bp: bp, s: scope, args: args})
        FROM event JOIN lost USING (seq) ORDER BY seq
        """,
        [reason],
    )


def _merge_arguments(connection: DuckDBPyConnection, ends: list[tuple[int, int]]) -> None:
    """Merge the arguments of an end into those of its begin."""
    if not ends:
        return
    pairs = np.asarray(ends, np.int64)
    closing = {"begun": pairs[:, 0], "ended": pairs[:, 1]}  # noqa: F841  # DuckDB finds it by its name
    connection.execute(
        f"""
        UPDATE staged SET args = json_merge_patch(coalesce(staged.args, '{{}}'), later.args)
        FROM closing JOIN event AS later ON later.seq = closing.ended
        WHERE staged.rowid = closing.begun & {ROW} AND later.args IS NOT NULL
        """
    )


def _ids(nested: NestedSlices, first: int, seq: Ints) -> Ints:
    """An id per slice, over all tracks: by time, descending length, then order in the file."""
    ids = np.empty(len(nested.ts), np.int64)
    ids[np.lexsort((seq[nested.order], -nested.end, nested.ts))] = np.arange(first, first + len(nested.ts))
    return ids


def write_slices(connection: DuckDBPyConnection, slices: Slices) -> None:
    """Rows of `slice`, `overlap` and `arg_set`."""
    nested, ids = slices.nest, slices.ids
    parent = np.ma.masked_array(ids[nested.parent] if len(ids) else ids, nested.parent < 0)
    placed = {  # noqa: F841  # DuckDB finds it by its name
        "seq": slices.seq,
        "id": ids,
        "dur": slices.dur,
        "track_id": nested.track,
        "depth": nested.depth,
        "parent_id": parent,
    }
    connection.execute(
        """
        INSERT INTO slice
        SELECT p.id, e.ts, p.dur, p.track_id, e.category, e.name, p.depth, p.parent_id,
               CASE WHEN e.args IS NOT NULL THEN p.id END
        FROM event e JOIN placed p USING (seq)
        """
    )
    connection.execute(
        "INSERT INTO arg_set SELECT p.id, e.args FROM event e JOIN placed p USING (seq) WHERE e.args IS NOT NULL"
    )
    outlasting = {"id": np.sort(ids[nested.overlaps])}  # noqa: F841  # DuckDB finds it by its name
    connection.execute("INSERT INTO overlap SELECT id FROM outlasting")
