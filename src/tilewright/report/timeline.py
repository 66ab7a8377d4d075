"""The timeline of a run for the page: at most 20,000 slices with their flows, counters and arguments."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tilewright.report.coarsen import Blocks, Integers, coarsen, thin
from tilewright.report.kinds import kind_of
from tilewright.report.page_budget import cut, harmless_json, shortened
from tilewright.report.quantity import count, nbytes

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MOST_SLICES = 20_000
MOST_FLOWS = 20_000
# Most rows drawn per track; malicious traces can have millions.
DEEPEST = 250
_CURVE_ROWS = 3
MOST_TRACKS = 250
MOST_COUNTERS = 24
MOST_POINTS = 4_000
_POINTS_OF_ALL = 20_000
_ROOM_OF_NAMES = 350_000
_ROOM_OF_ARGUMENTS = 400_000
_LONGEST_VALUE = 300
_LONGEST_NAME = 400
# Arguments that only link or count events.
_TIES = frozenset(
    {"External id", "correlation", "Ev Idx", "Record function id", "Sequence number", "Fwd thread id", "Python id"}
    | {"Python parent id", "Python module id", "Addr", "cbid", "finished", "context", "device", "stream"}
)

_LABELS = """
    SELECT coalesce(name, '') AS name, coalesce(category, '') AS category,
           row_number() OVER (ORDER BY count(*) DESC, coalesce(name, ''), coalesce(category, '')) - 1 AS label
    FROM slice WHERE name IS DISTINCT FROM '[memory]' AND depth < {deepest}
    GROUP BY 1, 2"""
_SLICES = """
    WITH label AS ({labels})
    SELECT s.id, s.ts, s.dur, s.track_id, s.depth, coalesce(s.arg_set_id, -1) AS arg_set_id, label.label
    FROM slice s JOIN label ON coalesce(s.name, '') = label.name AND coalesce(s.category, '') = label.category
    WHERE s.name IS DISTINCT FROM '[memory]' AND s.depth < {deepest}
    ORDER BY s.track_id, s.depth, s.ts, s.id"""
_TRACKS = """
    SELECT track.id, coalesce(thread.name, track.name), thread.tid, coalesce(process.name, ''), process.pid,
           process.device, process.upid,
           nullif(concat_ws(', ', 'rank ' || trace_file.rank, part.name,
                            CASE WHEN coalesce(trace_file.rank::VARCHAR, part.name) IS NULL AND files.number > 1
                                 THEN parse_filename(trace_file.path) END), '') AS origin
    FROM track
    LEFT JOIN thread_track ON thread_track.id = track.id
    LEFT JOIN thread ON thread.utid = thread_track.utid
    LEFT JOIN process_track ON process_track.id = track.id
    LEFT JOIN process ON process.upid = coalesce(thread.upid, process_track.upid)
    LEFT JOIN trace_file ON trace_file.id = process.file_id
    LEFT JOIN ({parts}) AS part ON part.file_id = trace_file.id
    CROSS JOIN (SELECT count(*) AS number FROM trace_file) AS files"""
_PARTS = """
    SELECT file_id, 'timed steps' AS name FROM description
    UNION SELECT described_by, 'the step described' FROM description WHERE described_by IS NOT NULL"""
_NO_PARTS = "SELECT NULL::BIGINT AS file_id, NULL::VARCHAR AS name"


@dataclass(frozen=True)
class Slices:
    """Columns of the slices of a trace, sorted by (track, depth, ts)."""

    id: Integers
    ts: Integers
    dur: Integers
    track: Integers
    depth: Integers
    arg_set: Integers
    label: Integers

    @property
    def row(self) -> Integers:
        """A number for each depth of each track, in order."""
        new = (np.diff(self.track, prepend=-1) != 0) | (np.diff(self.depth, prepend=-1) != 0)
        return np.cumsum(new) - 1


def timeline(connection: DuckDBPyConnection, most: int = MOST_SLICES) -> dict[str, Any] | None:
    """The timeline of the page before `laid_out`; None if the run has no slice.

    `columns` has for each slice `begin` and `length` (-1: never ended) in ns from `origin`, its `label` in `names`, its
    `args` among those (plus one; 0: none), the `count` of slices that it stands for, its `id`, the place of the slice
    around it (`outer`, or -1), whether it `is_python`, and its `level` among such slices of its track. `most` bounds
    the slices; `kept` says in numbers what was merged or left out.
    """
    slices, labels, left_out = _read(connection)
    if not slices.id.size:
        return None
    # The profiler's marks and instants may be far outside the recorded time.
    ran = slices.dur > 0 if (slices.dur > 0).any() else slices.dur > -2
    origin = int(slices.ts.min())
    end = int((slices.ts + np.maximum(slices.dur, 0))[ran].max())
    blocks = coarsen(slices.row, slices.ts, slices.dur, most)
    drawn = blocks.longest
    names, labels_of = _names(labels, slices.label[drawn])
    sets, args_of, without = _arguments(connection, slices, blocks)
    is_python = np.array([kind == "python" for _, _, kind in names], dtype=bool)[labels_of]
    level, outer = _levels(slices.track[drawn], blocks.ts, slices.depth[drawn], is_python)
    flows, all_flows = _flows(connection, slices, blocks)
    return {
        "origin": origin,
        "span": end - origin,
        "names": names,
        "args": sets,
        "columns": {
            "begin": blocks.ts - origin,
            "length": np.maximum(blocks.dur, -1),
            "label": labels_of,
            "args": args_of,
            "count": blocks.count,
            "id": slices.id[drawn],
            "outer": outer,
            "level": level,
            "is_python": is_python.astype(np.int64),
            # Whether `id` is that of the slice that caused a span of a device's accounting.
            "caused": np.zeros_like(level),
        },
        "tracks": _tracks(connection, slices, drawn),
        "flows": flows,
        "counters": _counters(connection, origin),
        "kept": {
            "slices": int(slices.id.size) + left_out,
            "blocks": int(np.count_nonzero(blocks.count > 1)),
            "merged": int(blocks.count[blocks.count > 1].sum()),
            "shortest_ns": blocks.shortest_ns,
            "whole_ns": None if blocks.whole is None else [edge - origin for edge in blocks.whole],
            "left_out": left_out,
            "flows": all_flows,
            "without_arguments": without,
        },
    }


def laid_out(lines: dict[str, Any]) -> dict[str, Any]:
    """`lines` of `timeline` as JSON: curves above devices above host threads, and every slice in its row.

    A track's Python frames stand below its other slices. `slices` are the columns, `homes` the tracks that `track`
    of a slice means, `tracks` the headings of the rows, `rows` their number.
    """
    columns, counters = lines.pop("columns"), lines["counters"]
    headings = [(_CURVE_ROWS * place + 1, _scaled_name(counter)) for place, counter in enumerate(counters)]
    rows, of_track = np.zeros_like(columns["begin"]), np.zeros_like(columns["begin"])
    row, process = _CURVE_ROWS * len(counters), None
    homes = sorted(lines.pop("tracks"), key=_order)
    for place, track in enumerate(homes):
        first, last = track.pop("span")
        if track["process"] != process:
            process = track["process"]
            headings.append((row, process))
            row += 1
        level, is_python = columns["level"][first:last], columns["is_python"][first:last]
        others = int(level[is_python == 0].max(initial=-1)) + 1
        rows[first:last] = row + level + others * is_python
        of_track[first:last] = place
        headings.append((row, track["name"]))
        row = int(rows[first:last].max()) + 1
    shown = {key: values.tolist() for key, values in columns.items() if key not in ("level", "is_python")}
    return lines | {
        "origin": str(lines["origin"]),
        "slices": shown | {"row": rows.tolist(), "track": of_track.tolist()},
        "homes": homes,
        "tracks": [{"mid": row + 0.5, "name": name} for row, name in headings],
        "counters": [
            counter | {"row": _CURVE_ROWS * place, "height": _CURVE_ROWS} for place, counter in enumerate(counters)
        ],
        "rows": row,
    }


def _scaled_name(counter: Mapping[str, Any]) -> str:
    most = max(counter["values"], default=0.0)
    return f"{counter['name']}, at most {nbytes(most) if counter['unit'] == 'bytes' else count(most)}"


def _order(track: Mapping[str, Any]) -> tuple[Any, ...]:
    """Devices first, then the busiest threads."""
    first, last = track["span"]
    return not track["device"], 0 if track["device"] else first - last, track["upid"] or math.inf, -track["busy"]


def _levels(track: Integers, ts: Integers, depth: Integers, is_python: NDArray[np.bool_]) -> tuple[Integers, Integers]:
    """How many slices of its sort (Python frames, or others) lie around each, and the place of the next outer one."""
    levels, outer = np.zeros_like(ts), np.full_like(ts, -1)
    # Of each depth: the slice there, and how many of both sorts are around the next slice.
    open_at: dict[int, int] = {}
    around: dict[int, tuple[int, int]] = {}
    last_track = None
    for place in np.lexsort((depth, ts, track)).tolist():
        if track[place] != last_track:
            last_track, open_at, around = track[place], {}, {}
        at, sort = int(depth[place]), int(is_python[place])
        counts = around.get(at, (0, 0))
        levels[place], outer[place] = counts[sort], open_at.get(at - 1, -1)
        around[at + 1] = counts[0] + (1 - sort), counts[1] + sort
        open_at[at] = place
    return levels, outer


def _read(connection: DuckDBPyConnection) -> tuple[Slices, list[tuple[str, str]], int]:
    """Slices, the name and category of each label, and the number of slices omitted by depth or track limits."""
    labels = _LABELS.format(deepest=DEEPEST)
    found = connection.execute(_SLICES.format(labels=labels, deepest=DEEPEST)).fetchnumpy()
    slices = Slices(*(np.asarray(column, dtype=np.int64) for column in found.values()))
    every = connection.execute("SELECT count(*) FROM slice WHERE name IS DISTINCT FROM '[memory]'").fetchone()
    tracks, sizes = np.unique(slices.track, return_counts=True)
    if tracks.size > MOST_TRACKS:
        busiest = tracks[np.argsort(-sizes, kind="stable")[:MOST_TRACKS]]
        kept = np.isin(slices.track, busiest)
        slices = Slices(*(getattr(slices, name)[kept] for name in Slices.__dataclass_fields__))
    texts = [(str(name), str(category)) for name, category, _ in connection.execute(f"{labels} ORDER BY 3").fetchall()]
    return slices, texts, (every[0] if every else 0) - int(slices.id.size)


def _names(labels: list[tuple[str, str]], used: Integers) -> tuple[list[tuple[str, str, str]], Integers]:
    """(name, category, kind) of the used labels, shortened for the page, and the new label of each slice."""
    kept, labels_of = np.unique(used, return_inverse=True)
    chosen = [labels[index] for index in kept.tolist()]
    names = shortened([name for name, _ in chosen], _LONGEST_NAME, _ROOM_OF_NAMES)
    categories = shortened([category for _, category in chosen], 40, _ROOM_OF_NAMES // 4)
    kinds = [kind_of(name, category) for name, category in chosen]
    return list(zip(names, categories, kinds, strict=True)), labels_of


def _arguments(
    connection: DuckDBPyConnection, slices: Slices, blocks: Blocks
) -> tuple[list[dict[str, str]], Integers, int]:
    """Distinct sets of arguments, each block's index among them plus one (0: none), and the number omitted.

    Where the budget does not suffice for all, the longest slices keep theirs.
    """
    set_of = np.where(blocks.count == 1, slices.arg_set[blocks.longest], -1)
    order = np.argsort(-blocks.dur, kind="stable")
    wanted = [arg_set for arg_set in dict.fromkeys(set_of[order].tolist()) if arg_set >= 0]
    rows = connection.execute(
        "SELECT arg_set_id, args FROM arg_set SEMI JOIN (SELECT unnest(?::BIGINT[]) AS arg_set_id) USING (arg_set_id)",
        [wanted],
    ).fetchall()
    texts: Mapping[int, str] = dict(rows)
    place: dict[int, int] = {-1: 0}
    places: dict[str, int] = {}
    budget = _ROOM_OF_ARGUMENTS
    for arg_set in wanted:
        shown = harmless_json(_argument_texts(texts.get(arg_set, "{}")))
        if shown not in places and shown != "{}" and len(shown) <= budget:
            places[shown] = len(places) + 1
            budget -= len(shown)
        place[arg_set] = 0 if shown == "{}" else places.get(shown, -1)
    found = np.array([place[arg_set] for arg_set in set_of.tolist()], dtype=np.int64)
    return [json.loads(text) for text in places], np.maximum(found, 0), int(np.count_nonzero(found < 0))


def _argument_texts(text: str) -> dict[str, str]:
    """The arguments worth showing, as text."""
    try:
        given = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(given, dict):
        return {}
    told = {}
    for key, value in given.items():
        shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        if key not in _TIES and shown not in ("", "[]", "{}", "null"):
            told[cut(key, 60)] = cut(shown, _LONGEST_VALUE)
    return told


def _tracks(connection: DuckDBPyConnection, slices: Slices, drawn: Integers) -> list[dict[str, Any]]:
    """Every track; `span` has the places of its drawn slices."""
    described = connection.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'description'").fetchone()
    rows_of = connection.execute(_TRACKS.format(parts=_PARTS if described else _NO_PARTS)).fetchall()
    about = {row[0]: row[1:] for row in rows_of}
    track, depth, dur = slices.track[drawn], slices.depth[drawn], np.maximum(slices.dur[drawn], 0)
    tracks = []
    for first, last in _runs(track):
        name, tid, process, pid, device, upid, file = about.get(int(track[first]), (None,) * 7)
        outermost = depth[first:last] == depth[first]
        tracks.append(
            {
                "name": cut(_stream(tid) if device is not None else str(name or tid or "events"), 80),
                "process": cut(_process(process, pid, file), 80),
                "upid": upid,
                "device": device is not None,
                "busy": int(dur[first:last][outermost].sum()),
                "span": (first, last),
            }
        )
    return tracks


def _stream(tid: int | None) -> str:
    return "stream" if tid is None else f"stream {tid}"


def _process(name: str | None, pid: int | None, file: str | None) -> str:
    """A process's name and number, and its file or rank if there are several."""
    parts = [name or "process", "" if pid is None or (name and str(pid) in name) else str(pid)]
    return " ".join(filter(None, [*parts, f"({file})" if file else ""]))


def _runs(values: Integers) -> Iterable[tuple[int, int]]:
    """First and past-last index of each run of equal values."""
    first = np.flatnonzero(np.diff(values, prepend=values[:1] - 1)).tolist()
    return list(zip(first, [*first[1:], values.size], strict=True))


def _flows(connection: DuckDBPyConnection, slices: Slices, blocks: Blocks) -> tuple[dict[str, Any], int]:
    """Flows between drawn blocks, sorted by their start, and the number of flows in the trace."""
    found = connection.execute("SELECT slice_out, slice_in, coalesce(category, '') AS category FROM flow").fetchall()
    kinds = list(dict.fromkeys(row[2] for row in found))[:16]
    table = [(out, into, kinds.index(kind)) for out, into, kind in found if kind in kinds]
    ends = np.array(table, dtype=np.int64).reshape(-1, 3)
    order = np.argsort(slices.id)
    sorted_ids = slices.id[order]
    columns = []
    known = np.ones(len(ends), dtype=bool)
    for ids in (ends[:, 0], ends[:, 1]):
        place = np.minimum(np.searchsorted(sorted_ids, ids), sorted_ids.size - 1)
        known &= sorted_ids[place] == ids
        columns.append(blocks.block_of[order[place]])
    arrows = np.unique(np.stack([*columns, ends[:, 2]], axis=1)[known], axis=0)[:MOST_FLOWS]
    return {
        "kinds": [cut(kind, 40) for kind in kinds],
        "out": arrows[:, 0].tolist(),
        "into": arrows[:, 1].tolist(),
        "kind": arrows[:, 2].tolist(),
    }, len(found)


def _counters(connection: DuckDBPyConnection, origin: int) -> list[dict[str, Any]]:
    """The trace's counters, thinned to a drawable number of points."""
    rows = connection.execute(
        "SELECT id, name, unit FROM counter_track WHERE id IN (SELECT track_id FROM counter) ORDER BY id"
    ).fetchall()
    counters = []
    most = points_of_one(min(len(rows), MOST_COUNTERS))
    for track, name, unit in rows[:MOST_COUNTERS]:
        found = connection.execute("SELECT ts, value FROM counter WHERE track_id = ? ORDER BY ts, id", [track])
        points = found.fetchnumpy()
        counters.append(curve(str(name or "counter"), str(unit or ""), points["ts"] - origin, points["value"], most))
    return counters


def points_of_one(curves: int) -> int:
    """The most points per curve for a number of curves."""
    return min(MOST_POINTS, _POINTS_OF_ALL // max(curves, 1))


def curve(name: str, unit: str, ts: Integers, value: Any, most: int = MOST_POINTS) -> dict[str, Any]:
    """A step curve for the page; `ts` in ns from the start of the trace."""
    values = np.nan_to_num(np.asarray(value, dtype=np.float64))
    kept = thin(ts, values, most)
    return {
        "name": cut(name, 80),
        "unit": cut(unit, 20),
        "ts": np.maximum(ts[kept], 0).tolist(),
        "values": values[kept].tolist(),
        "points": int(ts.size),
    }
