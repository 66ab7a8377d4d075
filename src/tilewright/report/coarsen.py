"""Reduces the slices of a trace for drawing: merges neighbours too short to see into blocks."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True)
class Blocks:
    """The blocks to draw, in the order (row, start).

    `ts` and `dur` are ns; `longest` is the index, in the input, of the longest slice of a block, and `count` the
    number of its slices. `block_of` gives the block of each input slice. Slices of at least `shortest_ns` are not
    merged, nor slices in the interval `whole` (begin and end in ns; None: the whole trace).
    """

    row: Integers
    ts: Integers
    dur: Integers
    longest: Integers
    count: Integers
    block_of: Integers
    shortest_ns: int
    whole: tuple[int, int] | None


def coarsen(row: Integers, ts: Integers, dur: Integers, most: int) -> Blocks:
    """At most `most` blocks (but at least one per row) for slices sorted by (row, ts).

    Half of them go to the middle of the trace, where nothing is merged: there one can look as closely as one likes.
    Elsewhere the threshold is the smallest duration that suffices, to within 2 %: a slice as long as that stays
    itself, and shorter neighbours of one row that are less than that apart become one block. Slices of unknown
    length (`dur` below zero) stay themselves.
    """
    whole = None if ts.size <= most else _middle(ts, most // 2)
    kept = dur < 0
    if whole is not None:
        kept |= (ts >= whole[0]) & (ts < whole[1])
    threshold = _threshold(row, ts, dur, kept, most)
    starts = _starts(row, ts, dur, kept, threshold)
    first = np.flatnonzero(starts)
    block_of = np.cumsum(starts) - 1
    count = np.diff(np.append(first, row.size))
    if not first.size:
        return Blocks(row, ts, dur, first, count, block_of, threshold, whole)
    end = np.maximum.reduceat(ts + np.maximum(dur, 0), first)
    alone = count == 1
    return Blocks(
        row=row[first],
        ts=ts[first],
        dur=np.where(alone, dur[first], end - ts[first]),
        longest=_longest(dur, block_of, first),
        count=count,
        block_of=block_of,
        shortest_ns=threshold,
        whole=whole,
    )


def _middle(ts: Integers, most: int) -> tuple[int, int]:
    """The interval around the middle of the trace in which at most `most` slices start."""
    first = (ts.size - most) // 2
    order = np.partition(ts, (first, first + most))
    return int(order[first]) + 1, int(order[first + most])


def _threshold(row: Integers, ts: Integers, dur: Integers, kept: NDArray[np.bool_], most: int) -> int:
    """The least threshold that suffices, by doubling and then bisection."""

    def suffices(threshold: int) -> bool:
        return int(np.count_nonzero(_starts(row, ts, dur, kept, threshold))) <= most

    if row.size <= most:
        return 0
    high = 1
    while not suffices(high) and high < 2**61:
        high *= 2
    low = high // 2
    while high - low > 1 + high // 64:
        middle = (low + high) // 2
        low, high = (low, middle) if suffices(middle) else (middle, high)
    return high


def _starts(row: Integers, ts: Integers, dur: Integers, kept: NDArray[np.bool_], threshold: int) -> NDArray[np.bool_]:
    """Where a block begins: at each kept slice, after one, in a new row, and after a visible gap."""
    short = ~kept & (dur < threshold)
    near = ts[1:] - (ts[:-1] + dur[:-1]) < threshold
    starts = np.ones(row.size, dtype=bool)
    starts[1:] = ~((row[1:] == row[:-1]) & short[1:] & short[:-1] & near)
    return starts


def _longest(dur: Integers, block_of: Integers, first: Integers) -> Integers:
    """The first of the longest slices of each block."""
    order = np.lexsort((-dur, block_of))
    return order[first]


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
