"""The self time of slices: at every instant a thread's time belongs to the slice that began last, whatever overlaps."""

from __future__ import annotations

import numpy as np

from tilewright.trace.events.nesting import NestedSlices
from tilewright.trace.events.rows import Ints


def self_times(nest: NestedSlices) -> tuple[Ints, Ints]:
    """The self time of each slice, in the unit of its times, and its outer slice or -1; in the order of `nest`.

    Self times sum to the busy time of the track, which is the length of the union of its slices. Cut each slice where
    the first slice that outlasts it begins: those left nest, cover the same time, and keep their parents.

    The outer slice is the innermost that holds at least half of the slice: where a step ends inside the range of
    the optimizer that ended it, the range is in that step, and the next step is not in the range.

    No slice may be `PENDING`.
    """
    end, outer = _cut(nest)
    length = end - nest.ts
    own = length.copy()
    inner = np.flatnonzero(nest.parent >= 0)
    np.subtract.at(own, nest.parent[inner], length[inner])
    return own, outer


def _cut(nest: NestedSlices) -> tuple[Ints, Ints]:
    """The end of each slice, or the begin of the first slice that outlasts it; and its outer slice.

    The slice that cuts another is the next one with a later end; a stack with decreasing ends finds it. Only slices
    that are still open at the next overlap can be cut.
    """
    ends, outer = nest.end.copy(), nest.parent.copy()
    late = np.flatnonzero(nest.overlaps)
    if not late.size:
        return ends, outer
    following = late[np.minimum(np.searchsorted(late, np.arange(len(ends)), side="right"), late.size - 1)]
    still_open = (nest.track[following] == nest.track) & (nest.ts[following] < nest.end)
    stack: list[tuple[int, int, int]] = []
    for place in np.union1d(np.flatnonzero(still_open), late).tolist():
        track, ts, end = int(nest.track[place]), int(nest.ts[place]), int(nest.end[place])
        placed = False
        while stack and (stack[-1][1] != track or stack[-1][2] < end):
            earlier, its_track, its_end = stack.pop()
            if its_track == track and its_end > ts:
                ends[earlier] = ts
                if not placed and 2 * (its_end - ts) >= end - ts:
                    outer[place], placed = earlier, True
        stack.append((place, track, end))
    return ends, outer
