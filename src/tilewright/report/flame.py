"""Flame graphs: in drawing order, as JSON for the page, as an SVG file, as a file for speedscope.

The SVG has no scripts; the title of each frame has its figures. https://www.speedscope.app reads the format of its
version 0.6.0 and later.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import numpy as np

from tilewright.records.atomic_file import write_document
from tilewright.records.counted import counted
from tilewright.records.errors import StoreError
from tilewright.report.kinds import kind_of
from tilewright.report.page_budget import shortened
from tilewright.report.quantity import duration
from tilewright.store.query import reading
from tilewright.trace.flame import Flame, flame
from tilewright.trace.frames import place_of

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


_WIDTH, _ROW, _TOP, _LETTER = 1400, 17, 46, 6.7
_NARROWEST = 0.4
_MOST_NODES = 20_000
# Characters that XML 1.0 excludes, even escaped.
_NO_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_COLOURS = {
    "compute": "#9fbde2", "pointwise": "#9ed3bf", "reduction": "#eac696", "layout": "#d2d5d8", "random": "#cab3e2",
    "library": "#93d0d8", "launch": "#9fcdd7", "wait": "#e0a29d", "range": "#b3cae1", "python": "#e2e4e6",
}  # fmt: skip


def write_flame(run: Path, out: Path) -> Path:
    """The flame graph by device time if the run has one, else by host time; returns `out`.

    Raises:
        StoreError: the run is missing, damaged or without a timeline, or `out` cannot be written.
    """
    return write_document(out, flame_svg(flames(run)[-1]), "flame graph")


def flame_svg(tree: Flame) -> str:
    """`tree` from the root down, a row per depth; frames too narrow to see are omitted and counted."""
    scale = _WIDTH / max(int(tree.total[0]), 1)
    placed = [node for node in in_order(tree, _MOST_NODES) if node.total * scale >= _NARROWEST]
    height = _TOP + _ROW * (1 + max(node.depth for node in placed)) + 8
    boxes = "\n".join(_box(tree, node, scale) for node in placed)
    steps = f" over {counted(tree.steps, 'step')}" if tree.steps else ""
    hidden = tree.parent.size - len(placed)
    left_out = f"; {counted(hidden, 'narrower frame')} {'is' if hidden == 1 else 'are'} not drawn" if hidden else ""
    title = f"{TITLES[tree.weight]}: {duration(int(tree.total[0]) / 1000)}{steps}{left_out}"
    return f"""\
<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" viewBox="0 0 {_WIDTH} {height}">
<style>
text {{ font: 11px ui-monospace, Menlo, Consolas, "Liberation Mono", monospace; fill: #1c2024 }}
.title {{ font: 15px Charter, Georgia, serif }}
rect {{ stroke: #fff; stroke-width: .6 }}
rect:hover {{ stroke: #1c2024; stroke-width: 1 }}
</style>
<rect width="100%" height="100%" fill="#fff"/>
<text class="title" x="8" y="26">{escape(title)}</text>
{boxes}
</svg>
"""


def _box(tree: Flame, node: Node, scale: float) -> str:
    name = _NO_XML.sub("\ufffd", tree.names[node.frame])
    x, width, y = node.start * scale, node.total * scale, _TOP + node.depth * _ROW
    share = 100 * node.total / max(int(tree.total[0]), 1)
    own, calls = duration(node.own / 1000), counted(node.calls, "call")
    title = f"{name}\n{duration(node.total / 1000)}, {share:.2f} %; own {own}; {calls}"
    letters = int((width - 6) / _LETTER)
    label = "" if letters < 3 else name if len(name) <= letters else name[: letters - 1] + "…"
    text = f'<text x="{x + 3:.2f}" y="{y + 12}">{escape(label)}</text>' if label else ""
    fill = _COLOURS[kind_of(name, tree.categories[node.frame])]
    return (
        f'<g><title>{escape(title)}</title><rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_ROW - 1}" '
        f'fill="{fill}"/>{text}</g>'
    )


def write_speedscope(run: Path, out: Path) -> Path:
    """Every flame graph of the run in one file; returns `out`.

    Raises:
        StoreError: the run is missing, damaged or without a timeline, or `out` cannot be written.
    """
    return write_document(out, json.dumps(speedscope(flames(run), run.stem), separators=(",", ":")), "speedscope file")


def speedscope(trees: Sequence[Flame], name: str) -> dict[str, Any]:
    """One profile per tree, in ns, with shared frames.

    A folded tree has no order in time: its nodes open and close one after another, each as long as its total.
    """
    from tilewright import __version__

    frames: dict[str, int] = {}
    profiles = []
    for tree in trees:
        place = {frame: frames.setdefault(text, len(frames)) for frame, text in enumerate(tree.names)}
        profiles.append(
            {
                "type": "evented",
                "name": TITLES[tree.weight],
                "unit": "nanoseconds",
                "startValue": 0,
                "endValue": int(tree.total[0]),
                "events": list(_events(in_order(tree, tree.parent.size), place)),
            }
        )
    return {
        "$schema": "https://www.speedscope.app/file-format-schema.json",
        "shared": {"frames": [_frame(text) for text in frames]},
        "profiles": profiles,
        "name": name,
        "activeProfileIndex": 0,
        "exporter": f"tilewright@{__version__}",
    }


def _events(nodes: Iterable[Node], place: dict[int, int]) -> Iterable[dict[str, Any]]:
    """Open and close events in the order of `at`; a node's self time comes after its children."""
    open_nodes: list[tuple[int, int]] = []
    now = 0
    for node in nodes:
        while len(open_nodes) > node.depth:
            frame, now = open_nodes.pop()
            yield {"type": "C", "frame": frame, "at": now}
        yield {"type": "O", "frame": place[node.frame], "at": now}
        open_nodes.append((place[node.frame], now + node.total))
    for frame, end in reversed(open_nodes):
        yield {"type": "C", "frame": frame, "at": end}


def _frame(text: str) -> dict[str, Any]:
    place = place_of(text)
    return {"name": text} if place is None else {"name": place.function, "file": place.file, "line": place.line}
