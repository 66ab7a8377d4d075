"""Reduces the slices of a trace for drawing: neighbours too short to see become one block."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

Integers = NDArray[np.int64]

_MIDDLE = "SELECT quantile_disc(ts, $opens), quantile_disc(ts, $closes) FROM shown"
# Two neighbours of a row become one block if both last less than the threshold and so does the gap between them.
_SPACED = """
CREATE OR REPLACE TEMP TABLE spaced AS
SELECT *, CASE WHEN can_merge AND lag(can_merge) OVER neighbours
               THEN greatest(dur, lag(dur) OVER neighbours, ts - lag(ts + dur) OVER neighbours) END AS apart_ns
FROM (SELECT *, dur >= 0 AND NOT (ts >= $opens AND ts < $closes) AS can_merge FROM shown)
WINDOW neighbours AS (PARTITION BY track_id, depth ORDER BY ts, id)"""
_THRESHOLD = "SELECT apart_ns + 1 FROM spaced WHERE apart_ns IS NOT NULL ORDER BY apart_ns DESC LIMIT 1 OFFSET $longer"
_PLACED = """
CREATE OR REPLACE TEMP TABLE placed AS
SELECT * EXCLUDE (can_merge, apart_ns),
       sum((apart_ns IS NULL OR apart_ns >= $shortest)::BIGINT) OVER (ORDER BY track_id, depth, ts, id) - 1 AS block
FROM spaced"""
_BLOCKS = """
CREATE OR REPLACE TEMP TABLE block AS
SELECT block, track_id, depth, count(*) AS count, min(ts) AS ts,
       CASE count WHEN 1 THEN any_value(dur) ELSE max(ts + dur) - min(placed.ts) END AS dur,
       CASE count WHEN 1 THEN any_value(arg_set_id) END AS arg_set_id,
       unnest(arg_max({id: id, span: span}, (dur, -ts, -id)))
FROM placed GROUP BY block, track_id, depth ORDER BY block"""


class Merged(NamedTuple):
    """Slices of at least `shortest_ns` are not merged, nor those that begin in `whole` (from, to; None: all)."""

    shortest_ns: int
    whole: tuple[int, int] | None


def merge_short(connection: DuckDBPyConnection, most: int) -> Merged:
    """Make of table `shown` (id, ts, dur, track_id, depth, ...) at most `most` blocks, but one for each row at least.

    A row is a depth of a track. Table `placed` has the slices with the number of their block, `block` the blocks in the
    order (track, depth, ts): `id` and `span` are those of the longest slice, `count` is their number.

    Half of the blocks go to the middle of the trace, where nothing is merged: there one can look as closely as one
    likes. Elsewhere the threshold is the least that suffices: a slice as long as that stays itself, and shorter
    neighbours of one row that are less than that apart become one block. Slices of unknown length (`dur` below zero)
    stay themselves.
    """

    def numbers(sql: str, **given: float) -> list[int]:
        rows = connection.execute(sql, given).fetchall()
        return [int(number) for number in rows[0]] if rows else []

    (count,) = numbers("SELECT count(*) FROM shown")
    whole, shortest = None, 0
    if count > most:
        share = most // 2 / count
        opens, closes = numbers(_MIDDLE, opens=0.5 - share / 2, closes=0.5 + share / 2)
        whole = opens + 1, closes
    connection.execute(_SPACED, dict(zip(("opens", "closes"), whole or (0, 0), strict=True)))
    if count > most:
        (gaps,) = numbers("SELECT count(apart_ns) FROM spaced")
        (shortest,) = numbers(_THRESHOLD, longer=max(gaps - (count - most), 0)) or [0]
    connection.execute(_PLACED, {"shortest": shortest})
    connection.execute(_BLOCKS)
    return Merged(shortest, whole)


def thin(ts: Integers, value: NDArray[np.float64], most: int) -> Integers:
    """Indices of at most `most` points of a step curve, sorted by time, including each bin's extremes.

    The span of time is cut into `most // 4` equal bins; of each, the first, the last, the least and the largest
    value stay, so that no peak is lost however far one zooms out.
    """
    if ts.size <= most:
        return np.arange(ts.size)
    bins = most // 4
    span = max(int(ts[-1]) - int(ts[0]), 1)
    place = np.minimum((ts - ts[0]).astype(np.float64) / span * bins, bins - 1).astype(np.int64)
    first = np.flatnonzero(np.diff(place, prepend=-1))
    last = np.append(first[1:], ts.size) - 1
    by_value = np.lexsort((value, place))
    return np.unique(np.concatenate((first, last, by_value[first], by_value[last])))
