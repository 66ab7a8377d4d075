"""The classes of each device's time as a track of the page's timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from tilewright.report.coarsen import coarsen

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

_MOST_SPANS = 4_000
CATEGORY = "accounting"
_KINDS = {
    "kernel": "compute", "wave tail": "reduction", "communication": "library", "copy": "layout",
    "synchronisation": "wait", "launch-bound": "launch", "idle": "python",
}  # fmt: skip
_SPANS = """
    SELECT ts, dur, coalesce(cause, 0) AS cause, array_position(?::VARCHAR[], class) - 1 AS class
    FROM device_time WHERE upid = ? AND array_position(?::VARCHAR[], class) IS NOT NULL ORDER BY ts"""


def add_device_time(connection: DuckDBPyConnection, lines: dict[str, Any]) -> None:
    """Add to `lines` of `report.timeline` one track for each device of `device_time`.

    A slice's name is the class; its id is that of the slice that caused the span, and `caused` says so.
    """
    names, tracks, columns = lines["names"], lines["tracks"], lines["columns"]
    first_name = len(names)
    names.extend((name, CATEGORY, kind) for name, kind in _KINDS.items())
    devices = connection.execute(
        "SELECT DISTINCT upid, coalesce(name, 'device') FROM device_time JOIN process USING (upid) ORDER BY upid"
    ).fetchall()
    for upid, name in devices:
        found = connection.execute(_SPANS, [list(_KINDS), upid, list(_KINDS)]).fetchnumpy()
        ts, dur, cause, label = (np.asarray(column, dtype=np.int64) for column in found.values())
        spans = coarsen(np.zeros_like(ts), ts, dur, _MOST_SPANS)
        chosen = spans.longest
        added = {
            "begin": np.maximum(spans.ts - lines["origin"], 0),
            "length": spans.dur,
            "label": label[chosen] + first_name,
            "count": spans.count,
            "id": cause[chosen],
            "outer": np.full_like(chosen, -1),
            "caused": np.ones_like(chosen),
        }
        span = len(columns["begin"]), len(columns["begin"]) + chosen.size
        for key, values in columns.items():
            columns[key] = np.concatenate([values, added.get(key, np.zeros_like(chosen))])
        tracks.append(
            {
                "name": "where its time went",
                # Next to the device's streams.
                "process": next((track["process"] for track in tracks if track["upid"] == upid), str(name)),
                "upid": upid,
                "device": True,
                "busy": int(dur.sum()),
                "span": span,
            }
        )
