"""The timeline of a run for the page: at most 50,000 slices with their flows, counters and arguments."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tilewright.report.coarsen import Blocks, Integers, coarsen, thin
from tilewright.report.packed import pack, zigzag
from tilewright.report.page_budget import cut, harmless_json, shortened

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

MOST_SLICES = 50_000
MOST_FLOWS = 50_000
# Most rows drawn per track; malicious traces can have millions.
DEEPEST = 250
MOST_TRACKS = 250
MOST_COUNTERS = 24
MOST_POINTS = 4_000
_POINTS_OF_ALL = 40_000
_ROOM_OF_NAMES = 500_000
_ROOM_OF_ARGUMENTS = 550_000
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
    """The timeline as JSON for the page; None if the run has no slice.

    `most` bounds the slices; the answer's `kept` says in numbers what was merged or left out.
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
    columns = {
        "ts": blocks.ts - origin,
        # 0 means a slice that never ended.
        "dur": np.maximum(blocks.dur, -1) + 1,
        "label": labels_of,
        "args": args_of,
        "count": blocks.count,
        "id": slices.id[drawn],
    }
    flows, all_flows = _flows(connection, slices, blocks)
    return {
        "origin": str(origin),
        "span": end - origin,
        "names": names,
        "args": sets,
        "tracks": _tracks(connection, slices, drawn, columns),
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


_KINDS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("library", r"nccl|all_?reduce|all_?gather|reduce_?scatter|broadcast|c10d::"),
        ("random", r"dropout|rand|bernoulli|philox"),
        ("compute", r"gemm|(?<![a-z])(b?add)?b?mm(backward\d*)?(?![a-z])|"
                    r"matmul|linear|conv|attention|fmha|flash|einsum"),
        ("reduction", r"norm|softmax|reduce|loss|entropy|"
                      r"(^|[:_])(sum|mean|max|min|amax|var|std|cumsum|prod|argmax)(_|$)"),
        ("layout", r"mem(cpy|set)|copy|transpose|permute|view|reshape|expand|clone|contiguous|stride|slice|select|"
                   r"squeeze|empty|zeros|(^|[:_])(cat|t|to|fill|zero|resize|detach|alias|split|unbind|stack)_?$"),
    )
)  # fmt: skip


def kind_of(name: str, category: str) -> str:
    """The colour class of a slice, guessed from its name: an operator class, or a role on the host.

    >>> kind_of("aten::addmm", "cpu_op"), kind_of("cudaStreamSynchronize", "cuda_runtime")
    ('compute', 'wait')
    """
    if category in ("python_function", "thread"):
        return "python"
    if category in ("user_annotation", "gpu_user_annotation", "nvtx", "Trace"):
        return "range"
    if re.search(r"Synchronize|EventQuery|WaitEvent", name) and category.startswith("cuda"):
        return "wait"
    if category in ("cuda_runtime", "cuda_driver"):
        return "launch"
    return next((kind for kind, pattern in _KINDS if pattern.search(name)), "pointwise")


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


def _tracks(
    connection: DuckDBPyConnection, slices: Slices, drawn: Integers, columns: Mapping[str, Integers]
) -> list[dict[str, Any]]:
    """Every track with its packed rows: devices first, then host threads, each by activity."""
    described = connection.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'description'").fetchone()
    rows_of = connection.execute(_TRACKS.format(parts=_PARTS if described else _NO_PARTS)).fetchall()
    about = {row[0]: row[1:] for row in rows_of}
    track, depth = slices.track[drawn], slices.depth[drawn]
    tracks = []
    for first, last in _runs(track):
        name, tid, process, pid, device, upid, file = about.get(int(track[first]), (None,) * 7)
        rows = [(a + first, b + first) for a, b in _runs(depth[first:last])]
        part: dict[str, NDArray[Any]] = {key: values[first:last] for key, values in columns.items()}
        # Differences between neighbours, restarting in each row.
        part["ts"] = np.concatenate([np.diff(columns["ts"][a:b], prepend=0) for a, b in rows])
        part["id"] = zigzag(np.diff(part["id"], prepend=0))
        tracks.append(
            {
                "name": cut(_stream(tid) if device is not None else str(name or tid or "events"), 80),
                "process": cut(_process(process, pid, file), 80),
                "upid": upid,
                "device": device is not None,
                "rows": [[int(depth[a]), b - a] for a, b in rows],
                "busy": int(np.maximum(slices.dur[drawn][first : rows[0][1]], 0).sum()),
                **{key: pack(values) for key, values in part.items()},
                "first": int(first),
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
        "out": pack(np.diff(arrows[:, 0], prepend=0)),
        "into": pack(arrows[:, 1]),
        "kind": pack(arrows[:, 2]),
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
    ticks = np.maximum(ts[kept], 0)
    return {
        "name": cut(name, 80),
        "unit": cut(unit, 20),
        "ts": pack(np.diff(ticks, prepend=0)),
        "values": values[kept].tolist(),
        "points": int(ts.size),
    }
