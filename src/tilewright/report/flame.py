"""Flame graphs in drawing order, and as JSON for the page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tilewright.records.errors import StoreError
from tilewright.report.kinds import kind_of
from tilewright.report.page_budget import shortened
from tilewright.store.query import reading
from tilewright.trace.flame import Flame, flame

MOST_NODES = 4_000
TITLES = {"host": "Host time", "device": "Device time"}
_LONGEST_NAME = 240
_ROOM_OF_NAMES = 250_000


class Node(NamedTuple):
    """A node of a folded tree: `frame` indexes the tree's names; times are ns, `start` is the end of its sibling."""

    frame: int
    depth: int
    start: int
    own: int
    total: int
    calls: int


def flames(run: Path) -> list[Flame]:
    """The run's non-empty flame graphs: by host time, and by device time if kernels were recorded.

    Raises:
        StoreError: the run is missing or damaged, or nothing in it lasted: there is no timeline to fold.
    """
    with reading(run) as connection:
        if connection.execute("SELECT 1 FROM duckdb_tables() WHERE table_name = 'slice'").fetchone():
            found = [flame(connection, "host"), flame(connection, "device")]
        else:
            found = []
    found = [each for each in found if each.total[0] > 0]
    if not found:
        raise StoreError(f"run {run} has no timeline; `tilewright profile` and `tilewright trace` make runs with one")
    return found


def in_order(tree: Flame, most: int) -> Iterator[Node]:
    """The `most` nodes with the largest totals; each precedes its children, which are sorted by total."""
    kept = np.zeros(tree.parent.size, dtype=bool)
    # A child's total is at most its parent's, and the parent comes first: a stable sort keeps all ancestors.
    kept[np.argsort(-tree.total, kind="stable")[:most]] = True
    below: dict[int, list[int]] = {}
    for node in np.flatnonzero(kept)[1:].tolist():
        below.setdefault(int(tree.parent[node]), []).append(node)
    waiting = [(0, 0, 0)]
    while waiting:
        node, depth, start = waiting.pop()
        own, total = int(tree.own[node]), int(tree.total[node])
        yield Node(int(tree.frame[node]), depth, start, own, total, int(tree.calls[node]))
        children = sorted(below.get(node, []), key=lambda child: -int(tree.total[child]))
        starts = accumulate((int(tree.total[child]) for child in children), initial=start)
        waiting.extend(reversed([(child, depth + 1, at) for child, at in zip(children, starts, strict=False)]))


def drawn(tree: Flame, most: int = MOST_NODES) -> dict[str, Any]:
    """`tree` as JSON for the page: nodes are [name, depth, start, own, total, calls], names are [text, kind]."""
    place: dict[int, int] = {}
    nodes = [[place.setdefault(node.frame, len(place)), *node[1:]] for node in in_order(tree, most)]
    names = shortened([tree.names[frame] for frame in place], _LONGEST_NAME, _ROOM_OF_NAMES)
    kinds = [kind_of(tree.names[frame], tree.categories[frame]) for frame in place]
    return {
        "title": TITLES[tree.weight],
        "steps": tree.steps,
        "names": list(zip(names, kinds, strict=True)),
        "nodes": nodes,
        "left_out": int(tree.parent.size) - len(nodes),
    }
