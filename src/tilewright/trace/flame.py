"""Folds call stacks into one tree, weighted by host or device time.

A slice's stack is the slices around it on its track: with stacks recorded, Python frames above operators above
runtime calls; without, operators alone. Equal stacks of all steps and threads of one name are one node
(Gregg, "The Flame Graph", ACM Queue 14(2), 2016). Device time goes to the stack that launched the kernel.

Threads of a profile that ran Python and called nothing of PyTorch's or CUDA's are left out: they wait for others.
Frames of the recorder and of what starts a program are left out of the stacks.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Literal, cast

import numpy as np

from tilewright.trace.events.nesting import nest
from tilewright.trace.events.rows import Ints, find_ids
from tilewright.trace.events.self_time import self_times
from tilewright.trace.frames import fold_name

if TYPE_CHECKING:
    from collections.abc import Iterable

    from duckdb import DuckDBPyConnection

Weight = Literal["host", "device"]

_RECORDER = re.compile(r"^<frozen runpy>\(|(^|/)tilewright/(profiling|measure)/(\w+/)*\w+\.py\(")
_HIDDEN = -1
# Deeper slices count for their ancestor at this depth.
DEEPEST = 400
NOT_LAUNCHED = "(launch not in the trace)"
_DEVICE = "('kernel', 'gpu_memcpy', 'gpu_memset')"

_SLICES = f"""
    SELECT s.id, coalesce(s.parent_id, -1) AS parent, s.depth, s.ts, s.dur, s.track_id, utid, s.name, s.category
    FROM slice s
    LEFT JOIN thread_track ON thread_track.id = s.track_id
    LEFT JOIN thread USING (utid)
    LEFT JOIN process USING (upid)
    WHERE s.dur > 0 AND process.device IS NULL AND thread_track.id IS NOT NULL AND s.depth < {DEEPEST}
      AND coalesce(s.category, '') NOT IN ('Trace', 'gpu_user_annotation', 'overhead')
      AND coalesce(s.category, '') NOT IN {_DEVICE}
      AND (s.track_id IN (SELECT track_id FROM slice WHERE category <> 'python_function')
           OR NOT EXISTS (SELECT 1 FROM slice WHERE category IN ('cpu_op', 'cuda_runtime', 'cuda_driver')))"""
_HOST = """
    WITH host AS ({slices}),
    label AS (SELECT name, row_number() OVER (ORDER BY name) - 1 AS label FROM (SELECT DISTINCT name FROM host))
    SELECT id, parent, depth, ts, dur, track_id, utid, label
    FROM host JOIN label ON host.name IS NOT DISTINCT FROM label.name
    ORDER BY depth, id"""
_LABELS = """
    WITH host AS ({slices})
    SELECT name, min(category) FROM host GROUP BY name ORDER BY name"""
_KERNELS = f"""
    SELECT kernel.name, kernel.category, kernel.dur, coalesce(min(flow.slice_out), -1) AS launch, NULL AS operator
    FROM slice kernel LEFT JOIN flow ON flow.slice_in = kernel.id AND flow.category = 'ac2g'
    WHERE kernel.category IN {_DEVICE} AND kernel.dur > 0
    GROUP BY kernel.id, kernel.name, kernel.category, kernel.dur"""
# An analysed run has better attribution: launches by correlation id, and operators of replayed graphs.
_ATTRIBUTED = """
    SELECT slice.name, slice.category, slice.dur, coalesce(device_slice.launch_id, -1) AS launch, device_slice.operator
    FROM operator_slice AS device_slice JOIN slice ON slice.id = device_slice.slice_id WHERE slice.dur > 0"""
# Steps recorded without operators have no stacks; the described step has.
_NOT_LIGHT = " AND process.file_id NOT IN (SELECT file_id FROM description)"
_THREADS = """
    SELECT thread_track.id, coalesce(thread.name, 'thread') FROM thread_track LEFT JOIN thread USING (utid)"""


@dataclass(frozen=True)
class Flame:
    """A folded tree. Node 0 is the root; parents come before their children.

    `parent` and `frame` (an index into `names` and `categories`) describe the nodes; `own` (self time) and `total`
    (with all descendants) are ns. `calls` counts the slices of a node. `steps` is the number of profiled steps,
    0 if the trace marks none.
    """

    weight: Weight
    names: list[str]
    categories: list[str]
    parent: Ints
    frame: Ints
    own: Ints
    total: Ints
    calls: Ints
    steps: int


class _Tree:
    """Nodes under construction, found by (parent, frame)."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.categories: list[str] = []
        self._index: dict[str, int] = {}
        self.parents: list[Ints] = [np.array([-1])]
        self.frames: list[Ints] = [np.array([self.name("all", "thread")])]
        self.size = 1

    def name(self, text: str, category: str) -> int:
        """The frame of `text`; the first use sets its category."""
        if text not in self._index:
            self._index[text] = len(self.names)
            self.names.append(text)
            self.categories.append(category)
        return self._index[text]

    def children(self, parents: Ints, frames: Ints) -> Ints:
        """New nodes for each (parent, frame); call this once per parent."""
        wide = np.int64(len(self.names) + 1)
        keys, place = np.unique(parents * wide + frames, return_inverse=True)
        self.parents.append(keys // wide)
        self.frames.append(keys % wide)
        nodes = self.size + place
        self.size += keys.size
        return cast("Ints", nodes)


def flame(connection: DuckDBPyConnection, weight: Weight) -> Flame:
    """The stacks of a trace weighted by the host's or the device's time; a tree of one node if it has none.

    Host time is a slice's self time (`events/self_time.py`): all of them sum to the busy time of the threads.
    """
    slices = _SLICES + (_NOT_LIGHT if _attributed(connection) else "")
    labels = connection.execute(_LABELS.format(slices=slices)).fetchall()
    found = connection.execute(_HOST.format(slices=slices)).fetchnumpy()
    host = {name: np.asarray(column, dtype=np.int64) for name, column in found.items()}
    tree = _Tree()
    frame_of = np.where([bool(_RECORDER.search(name or "")) for name, _ in labels], _HIDDEN, _frames(tree, labels))
    place_of_parent = find_ids(host["id"], host["parent"])
    node_of = _fold(connection, tree, host, frame_of, place_of_parent)
    nested = nest(host["utid"], host["ts"], host["dur"])
    own = np.empty_like(host["dur"])
    own[nested.order] = self_times(nested)[0]
    counted = frame_of[host["label"]] != _HIDDEN
    if weight == "device":
        node_of, own = _launched(connection, tree, host["id"], node_of)
        counted = np.ones(node_of.size, dtype=bool)
    steps = connection.execute(
        f"SELECT count(DISTINCT name) FROM ({slices}) WHERE name LIKE 'ProfilerStep#%'"
    ).fetchone()
    calls = np.bincount(node_of[counted], minlength=tree.size).astype(np.int64)
    return _summed(tree, weight, node_of, own, calls, steps[0] if steps else 0)


def _fold(connection: DuckDBPyConnection, tree: _Tree, host: dict[str, Ints], frame_of: Ints, parents: Ints) -> Ints:
    """The node of every slice, one depth at a time, so that parents precede their children."""
    threads = dict(connection.execute(_THREADS).fetchall())
    tracks, place = np.unique(host["track_id"], return_inverse=True)
    # Threads with the same name in several processes share a root frame.
    frames = _frames(tree, [(threads.get(track, "thread"), "thread") for track in tracks.tolist()])
    distinct, which = np.unique(frames, return_inverse=True)
    roots = tree.children(np.zeros(distinct.size, dtype=np.int64), distinct)[which][place] if tracks.size else place
    node_of = np.zeros(host["id"].size, dtype=np.int64)
    bounds = np.flatnonzero(np.diff(host["depth"], prepend=-1, append=np.iinfo(np.int64).max))
    for first, last in pairwise(bounds.tolist()):
        level = slice(first, last)
        above = np.where(parents[level] >= 0, node_of[parents[level]], roots[level])
        frames = frame_of[host["label"][level]]
        shown = frames != _HIDDEN
        above[shown] = tree.children(above[shown], frames[shown])
        node_of[level] = above
    return node_of


def _frames(tree: _Tree, labels: Iterable[tuple[str | None, str | None]]) -> Ints:
    """The frame of each (name, category)."""
    made = [tree.name(fold_name(str(name or "(no name)")), category or "") for name, category in labels]
    return np.array(made, dtype=np.int64)


def _launched(connection: DuckDBPyConnection, tree: _Tree, ids: Ints, node_of: Ints) -> tuple[Ints, Ints]:
    """A node and a duration for each kernel and copy, below the stack of its launch."""
    rows = connection.execute(_ATTRIBUTED if _attributed(connection) else _KERNELS).fetchall()
    frames = _frames(tree, [row[:2] for row in rows])
    launches = find_ids(ids, np.array([row[3] for row in rows], dtype=np.int64))
    if not rows:
        return frames, frames
    above = np.where(launches >= 0, node_of[launches] if node_of.size else 0, 0)
    orphans = np.flatnonzero(launches < 0)
    if orphans.size:
        above[orphans] = _without_launch(tree, [rows[orphan][4] for orphan in orphans.tolist()])
    return tree.children(above, frames), np.array([row[2] for row in rows], dtype=np.int64)


def _attributed(connection: DuckDBPyConnection) -> bool:
    return bool(connection.execute("SELECT 1 FROM duckdb_views() WHERE view_name = 'operator_slice'").fetchone())


def _without_launch(tree: _Tree, operators: list[str | None]) -> Ints:
    """Nodes for work without a launch in the trace: under a separate root, by operator if known."""
    lost = tree.children(np.array([0]), np.array([tree.name(NOT_LAUNCHED, "thread")]))
    above = np.full(len(operators), lost[0], dtype=np.int64)
    known = np.array([operator is not None for operator in operators])
    if known.any():
        frames = _frames(tree, [(operator, "cpu_op") for operator in operators if operator is not None])
        above[known] = tree.children(above[known], frames)
    return above


def _summed(tree: _Tree, weight: Weight, node_of: Ints, own: Ints, calls: Ints, steps: int) -> Flame:
    """Sum self times to totals, children before parents; nodes without time are omitted."""
    parent, frame = np.concatenate(tree.parents), np.concatenate(tree.frames)
    sums = np.zeros(tree.size, dtype=np.int64)
    np.add.at(sums, node_of, own)
    total = sums.copy()
    for start, stop in reversed(list(_batches(tree.parents))):
        np.add.at(total, parent[start:stop], total[start:stop])
    kept = total > 0
    kept[0] = True
    place = np.cumsum(kept) - 1
    parent = np.where(parent >= 0, place[parent], -1)
    return Flame(
        weight, tree.names, tree.categories, parent[kept], frame[kept], sums[kept], total[kept], calls[kept], steps
    )


def _batches(parts: list[Ints]) -> Iterable[tuple[int, int]]:
    """Batches of nodes whose parents are in earlier batches."""
    stops = np.cumsum([part.size for part in parts]).tolist()
    return list(pairwise(stops))
