"""The timeline of a run for the page: at most 20,000 slices with their flows, counters and arguments."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tilewright.report.coarsen import Integers, merge_short, thin
from tilewright.report.kinds import ACCOUNTING, kind_of
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

# Slices of the busiest tracks, and the spans of each device's accounting as slices of a track of their own: `span` is
# the class, and `id` that of the slice that caused it.
_SHOWN = f"""
CREATE OR REPLACE TEMP TABLE shown AS
WITH every AS (
    SELECT id, ts, dur, track_id, depth, arg_set_id, NULL AS span
    FROM slice WHERE name IS DISTINCT FROM '[memory]' AND depth < {DEEPEST}
    {{accounting}}
)
FROM every SEMI JOIN (
    SELECT track_id FROM every GROUP BY track_id ORDER BY count(*) DESC, track_id LIMIT {MOST_TRACKS}
) USING (track_id)"""
_ACCOUNTING = """
    UNION ALL
    SELECT coalesce(cause, 0), ts, dur, -upid, 0, NULL, class FROM device_time"""
_PATH_TRACK = -(1 << 40)
_PATH = f"""
    UNION ALL
    SELECT 0, ts, dur, {_PATH_TRACK}, 0, NULL, kind FROM critical_path WHERE dur > 0"""
# The profiler's marks and instants may be far outside the recorded time.
_SPAN = """
SELECT min(ts), coalesce(max(ts + dur) FILTER (WHERE dur > 0), max(ts)), count(*) FROM shown WHERE span IS NULL"""
_COLUMNS = """
SELECT greatest(ts - $origin, 0) AS begin, greatest(dur, -1) AS length, count, id, (span IS NOT NULL)::BIGINT AS caused,
       track_id, depth, ts
FROM block ORDER BY block"""
_NAMES = f"""
SELECT coalesce(span, name, ''), CASE WHEN span IS NULL THEN coalesce(category, '') ELSE '{ACCOUNTING}' END
FROM block LEFT JOIN slice ON slice.id = block.id AND span IS NULL ORDER BY block"""
_TRACKS = f"""
SELECT CASE WHEN drawn.track_id = {_PATH_TRACK} THEN 'what a step waits for'
            WHEN drawn.track_id < 0 THEN 'where its time went' WHEN process.device IS NULL
            THEN coalesce(thread.name, track.name, thread.tid::VARCHAR, 'events')
            ELSE concat_ws(' ', 'stream', thread.tid) END,
       coalesce(process.name, CASE WHEN drawn.track_id = {_PATH_TRACK} THEN 'critical path' ELSE '' END), process.pid,
       process.upid, process.device IS NOT NULL OR drawn.track_id = {_PATH_TRACK},
       nullif(concat_ws(', ', 'rank ' || trace_file.rank, part.name,
                        CASE WHEN coalesce(trace_file.rank::VARCHAR, part.name) IS NULL AND files.number > 1
                             THEN parse_filename(trace_file.path) END), ''),
       drawn.busy, drawn.first, drawn.last
FROM (SELECT track_id, min(block) AS first, max(block) + 1 AS last,
             sum(greatest(dur, 0)) FILTER (WHERE depth = 0) AS busy FROM block GROUP BY track_id) AS drawn
LEFT JOIN track ON track.id = drawn.track_id
LEFT JOIN thread_track ON thread_track.id = drawn.track_id
LEFT JOIN thread ON thread.utid = thread_track.utid
LEFT JOIN process_track ON process_track.id = drawn.track_id
LEFT JOIN process
  ON process.upid = coalesce(thread.upid, process_track.upid, CASE WHEN drawn.track_id < 0 THEN -drawn.track_id END)
LEFT JOIN trace_file ON trace_file.id = process.file_id
LEFT JOIN ({{parts}}) AS part ON part.file_id = trace_file.id
CROSS JOIN (SELECT count(*) AS number FROM trace_file) AS files
ORDER BY drawn.first"""
_PARTS = """
    SELECT file_id, 'timed steps' AS name FROM description
    UNION SELECT described_by, 'the step described' FROM description WHERE described_by IS NOT NULL"""
_NO_PARTS = "SELECT NULL::BIGINT AS file_id, NULL::VARCHAR AS name"
_ARGUMENTS = """
SELECT block, args FROM block JOIN arg_set USING (arg_set_id) ORDER BY dur DESC, block"""
_FLOWS = f"""
SELECT DISTINCT source.block, target.block, coalesce(flow.category, '') AS category
FROM flow JOIN placed AS source ON source.id = flow.slice_out AND source.span IS NULL
JOIN placed AS target ON target.id = flow.slice_in AND target.span IS NULL
ORDER BY ALL LIMIT {MOST_FLOWS}"""


def timeline(connection: DuckDBPyConnection, most: int = MOST_SLICES) -> dict[str, Any] | None:
    """The timeline of the page before `laid_out`; None if the run has no slice.

    `columns` has for each slice `begin` and `length` (-1: never ended) in ns from `origin`, its `label` in `names`, its
    `args` among those (plus one; 0: none), the `count` of slices that it stands for, its `id`, whether that is of the
    slice that caused a span of a device's accounting (`caused`), the place of the slice around it (`outer`, or -1),
    whether it `is_python`, and its `level` among such slices of its track. `most` bounds the slices; `kept` says in
    numbers what was merged or left out.
    """
    present = {name for (name,) in connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()}
    more = [text for table, text in (("device_time", _ACCOUNTING), ("critical_path", _PATH)) if table in present]
    connection.execute(_SHOWN.format(accounting="".join(more)))
    ((origin, end, shown),) = connection.execute(_SPAN).fetchall()
    if not shown:
        return None
    merged = merge_short(connection, most)
    found = connection.execute(_COLUMNS, {"origin": origin}).fetchnumpy()
    columns = {name: np.asarray(column, dtype=np.int64) for name, column in found.items()}
    names, label = _names(connection.execute(_NAMES).fetchall())
    sets, args, without = _arguments(connection, label.size)
    is_python = np.array([kind == "python" and category != ACCOUNTING for _, category, kind in names], dtype=bool)[
        label
    ]
    level, outer = _levels(columns.pop("track_id"), columns.pop("ts"), columns.pop("depth"), is_python)
    ((every, all_flows),) = connection.execute(
        "SELECT (SELECT count(*) FROM slice WHERE name IS DISTINCT FROM '[memory]'), (SELECT count(*) FROM flow)"
    ).fetchall()
    several = columns["count"][columns["count"] > 1]
    return {
        "origin": origin,
        "span": end - origin,
        "names": names,
        "args": sets,
        "columns": columns
        | {"label": label, "args": args, "outer": outer, "level": level, "is_python": is_python.astype(np.int64)},
        "tracks": _tracks(connection, _PARTS if "description" in present else _NO_PARTS),
        "flows": _flows(connection),
        "counters": _counters(connection, origin),
        "kept": {
            "slices": every,
            "blocks": int(several.size),
            "merged": int(several.sum()),
            "shortest_ns": merged.shortest_ns,
            "whole_ns": merged.whole and [edge - origin for edge in merged.whole],
            "left_out": every - shown,
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
    # By depth: the open slice, and how many slices of each sort are around the next one.
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


def _names(labels: Sequence[tuple[str, str]]) -> tuple[list[tuple[str, str, str]], Integers]:
    """(name, category, kind) of the distinct labels, shortened for the page, and the place of each label among them."""
    place = {label: number for number, label in enumerate(dict.fromkeys(labels))}
    names = shortened([name for name, _ in place], _LONGEST_NAME, _ROOM_OF_NAMES)
    categories = shortened([category for _, category in place], 40, _ROOM_OF_NAMES // 4)
    kinds = [kind_of(name, category) for name, category in place]
    label = np.array([place[label] for label in labels], dtype=np.int64)
    return list(zip(names, categories, kinds, strict=True)), label


def _arguments(connection: DuckDBPyConnection, blocks: int) -> tuple[list[dict[str, str]], Integers, int]:
    """Distinct sets of arguments, each block's index among them plus one (0: none), and the number omitted.

    Where the budget does not suffice for all, the longest slices keep theirs.
    """
    found = np.zeros(blocks, dtype=np.int64)
    places: dict[str, int] = {}
    budget, omitted = _ROOM_OF_ARGUMENTS, 0
    for block, text in connection.execute(_ARGUMENTS).fetchall():
        shown = harmless_json(_argument_texts(text))
        if shown not in places and shown != "{}" and len(shown) <= budget:
            places[shown] = len(places) + 1
            budget -= len(shown)
        found[block] = places.get(shown, 0)
        omitted += shown != "{}" and shown not in places
    return [json.loads(text) for text in places], found, omitted


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


def _tracks(connection: DuckDBPyConnection, parts: str) -> list[dict[str, Any]]:
    """Every track; `span` has the places of its drawn slices."""
    return [
        {
            "name": cut(name, 80),
            "process": cut(_process(process, pid, file), 80),
            "upid": upid,
            "device": on_device,
            "busy": int(busy or 0),
            "span": (first, last),
        }
        for name, process, pid, upid, on_device, file, busy, first, last in connection.execute(
            _TRACKS.format(parts=parts)
        ).fetchall()
    ]


def _process(name: str | None, pid: int | None, file: str | None) -> str:
    """A process's name and number, and its file or rank if there are several."""
    parts = [name or "process", "" if pid is None or (name and str(pid) in name) else str(pid)]
    return " ".join(filter(None, [*parts, f"({file})" if file else ""]))


def _flows(connection: DuckDBPyConnection) -> dict[str, Any]:
    """Flows between drawn blocks, sorted by their start."""
    found = connection.execute(_FLOWS).fetchall()
    kinds = list(dict.fromkeys(kind for _, _, kind in found))[:16]
    arrows = [arrow for arrow in found if arrow[2] in kinds]
    return {
        "kinds": [cut(kind, 40) for kind in kinds],
        "out": [out for out, _, _ in arrows],
        "into": [into for _, into, _ in arrows],
        "kind": [kinds.index(kind) for _, _, kind in arrows],
    }


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
