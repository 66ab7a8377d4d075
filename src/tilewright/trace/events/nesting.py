"""The parent and depth of every slice, computed with arrays instead of a loop over slices."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tilewright.trace.events.rows import Ints

PENDING = np.iinfo(np.int64).max
_NEVER = int(np.iinfo(np.int64).min)
# Beyond this depth one pass over the remaining slices is cheaper than a pass per level.
_LEVELS = 256
# Upper bound of a group and a time combined in one integer.
_ROOM = 1 << 62


@dataclass(frozen=True)
class NestedSlices:
    """Slices sorted by track, begin, descending length, then position in the file; all arrays have that order.

    Attributes:
        order: for each place, which of the given slices stands there.
        track, ts, end: int64[n]; `end` of a slice that never ended is `PENDING`.
        parent: int64[n], the place of the innermost slice of the same track that holds it whole, or -1.
        depth: int64[n], the parent's + 1, or 0.
        overlaps: bool[n], begins within an earlier slice of its track and outlasts it.
    """

    order: Ints
    track: Ints
    ts: Ints
    end: Ints
    parent: Ints
    depth: Ints
    overlaps: NDArray[np.bool_]

    def holding(self, track: Ints, ts: Ints) -> Ints:
        """For each (track, ts) the index of the innermost slice that is open then, or -1.

        If none is open, an empty slice at this time is taken.
        """
        last = self._last_begun(track, ts)
        place = last.copy()
        climbing = np.flatnonzero(place >= 0)
        while climbing.size:
            climbing = climbing[self.end[place[climbing]] <= ts[climbing]]
            place[climbing] = self.parent[place[climbing]]
            climbing = climbing[place[climbing] >= 0]
        there = np.flatnonzero((place < 0) & (last >= 0))
        there = there[self.ts[last[there]] == ts[there]]
        place[there] = last[there]
        return place

    def following(self, track: Ints, ts: Ints) -> Ints:
        """For each (track, ts) the index of the first slice that begins then or later, or -1."""
        place = self._search(track, ts, "left")
        inside = place < len(self.ts)
        found = np.where(inside, place, 0)
        ok = inside & (self.track[found] == track) if len(self.ts) else inside
        return np.where(ok, place, -1)

    def _last_begun(self, track: Ints, ts: Ints) -> Ints:
        place = self._search(track, ts, "right") - 1
        if not len(self.ts):
            return place
        return np.where((place >= 0) & (self.track[place] == track), place, -1)

    def _search(self, track: Ints, ts: Ints, side: str) -> Ints:
        """Binary search in (track, ts), combined in one integer."""
        tracks = int(self.track.max(initial=0)) + int(track.max(initial=0)) + 1
        codes, times = _coded(np.concatenate([self.ts, ts]), tracks)
        key, wanted, span = codes[: len(self.ts)], codes[len(self.ts) :], times.count
        found = np.searchsorted(self.track * span + key, track * span + wanted, side=side)  # type: ignore[call-overload]
        return np.asarray(found, dtype=np.int64)


def nest(track: Ints, ts: Ints, dur: Ints) -> NestedSlices:
    """The nest of slices given as int64[n] arrays in the order of the file; `dur` is -1 for a slice that never ended.

    A slice is inside another of its track if it begins no earlier and ends no later; an empty slice is outside a
    longer one that ends at its time. Of two equal slices the first in the file is the outer. Level by level: a slice
    is outermost if it ends after all slices that began before it, by a running maximum of ends; the others are
    grouped by the last outermost slice before them, and each group is processed in the same way.
    """
    end = np.where(dur < 0, PENDING, ts + np.maximum(dur, 0))
    order = np.lexsort((-end, ts, track))
    track, ts, end = track[order], ts[order], end[order]
    # An empty slice ends just after its time: a longer slice that ends there does not contain it, an equal one does.
    beyond = max(int(ts.max()), int(end.max(where=end != PENDING, initial=_NEVER))) + 1 if len(ts) else 0
    first_track = int(track.min(initial=0))
    codes, ends = _coded(np.minimum(end, beyond), max(len(ts), int(track.max(initial=0)) - first_track + 1))
    reach = 2 * codes + (end == ts)
    span = 2 * ends.count + 2
    parent, depth = np.full(len(ts), -1, np.int64), np.zeros(len(ts), np.int64)
    overlaps = np.zeros(len(ts), np.bool_)
    left, group = np.arange(len(ts)), track - first_track
    for level in range(_LEVELS):
        if not left.size:
            break
        depth[left] = level
        floor = group * span
        so_far = np.maximum.accumulate(floor + reach[left])
        before = np.concatenate([[-1], so_far[:-1]]) - floor
        outer = before < reach[left]
        elder = outer & (before >= 0)
        overlaps[left[elder]] = ends.of(before[elder] // 2) > ts[left[elder]]
        last = np.maximum.accumulate(np.where(outer, np.arange(left.size), 0))
        inner = ~outer
        group = last[inner]
        parent[left[inner]] = left[group]
        left = left[inner]
    _one_by_one(left, ts, end, reach, parent, depth, overlaps)
    return NestedSlices(order, track, ts, end, parent, depth, overlaps)


@dataclass(frozen=True)
class _Times:
    """Decodes numbers from 0 to `count` to times: by the table `ranked`, or as consecutive times from `low` on."""

    count: int
    low: int = 0
    ranked: Ints | None = None

    def of(self, codes: Ints) -> Ints:
        return codes + self.low if self.ranked is None else self.ranked[codes]


def _coded(times: Ints, groups: int) -> tuple[Ints, _Times]:
    """`times` as small numbers in the same order, so that one of `groups` and a time fit into one integer.

    The code is the time since the first one, or if the codes are too large, the rank, which needs a sort.
    """
    if len(times):
        low = int(times.min())
        count = int(times.max()) - low + 1
        # `nest` doubles the times and adds the group.
        if 4 * groups * (count + 1) < _ROOM:
            return times - low, _Times(count, low)
    ranked, codes = np.unique(times, return_inverse=True)
    return codes.astype(np.int64), _Times(len(ranked), ranked=ranked)


def _one_by_one(
    left: Ints, ts: Ints, end: Ints, reach: Ints, parent: Ints, depth: Ints, overlaps: NDArray[np.bool_]
) -> None:
    """The parents of the slices at `left`, below the levels done; `parent` has the last one found for each."""
    stack: list[int] = []
    latest: list[int] = []  # the latest end among the children so far of each slice on the stack
    for place in left.tolist():
        if not stack or parent[place] != stack[0]:
            stack, latest = [int(parent[place])], [_NEVER]
        while len(stack) > 1 and reach[stack[-1]] < reach[place]:
            stack.pop()
            latest.pop()
        overlaps[place] = latest[-1] > ts[place]
        latest[-1] = max(latest[-1], int(end[place]))
        parent[place] = stack[-1]
        depth[place] = depth[stack[-1]] + 1
        stack.append(place)
        latest.append(_NEVER)
