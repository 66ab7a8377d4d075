"""Flame graphs as a file for speedscope (https://www.speedscope.app), in the format of its version 0.6.0 and later."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tilewright.records.atomic_file import write_document
from tilewright.report.flame import TITLES, Node, flames, in_order
from tilewright.trace.flame import Flame
from tilewright.trace.frames import place_of


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
