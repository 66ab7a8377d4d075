"""Parents, depths and overlaps against a stack that is walked slice by slice."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tilewright.trace.events import nesting
from tilewright.trace.events.nesting import PENDING, nest

SLICES = st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12), st.integers(-1, 8)), max_size=40)
Slice = tuple[int, int, int]


def walked(slices: list[Slice]) -> dict[int, tuple[int, int, bool]]:
    """Parent, depth and whether it overlaps, by the place in `slices`; for each slice all earlier ones are asked."""
    ends = [PENDING if dur < 0 else ts + dur for _, ts, dur in slices]
    order = sorted(range(len(slices)), key=lambda i: (slices[i][0], slices[i][1], -ends[i], i))
    found: dict[int, tuple[int, int, bool]] = {}
    for at, i in enumerate(order):
        track, ts, dur = slices[i]
        earlier = [j for j in order[:at] if slices[j][0] == track]

        def holds(j: int, ts: int = ts, dur: int = dur, i: int = i) -> bool:
            if dur == 0 and ends[j] == ts:
                return slices[j][2] == 0
            return ends[j] >= ends[i]

        parent = next((j for j in reversed(earlier) if holds(j)), -1)
        overlaps = any(found[j][0] == parent and ts < ends[j] < ends[i] for j in earlier)
        found[i] = (parent, found[parent][1] + 1 if parent >= 0 else 0, overlaps)
    return found


def nested(slices: list[Slice]) -> dict[int, tuple[int, int, bool]]:
    columns = np.asarray(slices, np.int64).reshape(-1, 3).T
    made = nest(*columns)
    return {
        int(made.order[place]): (
            int(made.order[made.parent[place]]) if made.parent[place] >= 0 else -1,
            int(made.depth[place]),
            bool(made.overlaps[place]),
        )
        for place in range(len(slices))
    }


@given(SLICES)
def test_equals_the_walk(slices: list[Slice]) -> None:
    assert nested(slices) == walked(slices)


@pytest.mark.parametrize(("limit", "value"), [("_LEVELS", 1), ("_ROOM", 0)], ids=["beyond the levels", "by ranks"])
@given(slices=SLICES)
def test_equals_the_walk_beyond_a_limit(limit: str, value: int, slices: list[Slice]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nesting, limit, value)
        assert nested(slices) == walked(slices)


def test_times_too_far_apart_for_one_number() -> None:
    far = 1 << 61
    slices = [(0, -far, 2 * far), (0, 0, 5), (1, far - 9, 9), (1, far - 5, 0), (1, 3, -1)]
    assert nested(slices) == walked(slices)


@given(SLICES, st.lists(st.tuples(st.integers(0, 3), st.integers(-1, 22)), min_size=1, max_size=10))
def test_what_holds_a_moment(slices: list[Slice], moments: list[tuple[int, int]]) -> None:
    made = nest(*np.asarray(slices, np.int64).reshape(-1, 3).T)
    track, ts = np.asarray(moments, np.int64).T
    for place, after, (where, when) in zip(made.holding(track, ts), made.following(track, ts), moments, strict=True):
        mine = np.flatnonzero(made.track == where)
        begun = mine[made.ts[mine] <= when]
        # Up from the last that began, until one is still open; else an instant at this very moment.
        last = int(begun[-1]) if begun.size else -1
        expected = last
        while expected >= 0 and made.end[expected] <= when:
            expected = int(made.parent[expected])
        if expected < 0 <= last and made.ts[last] == when:
            expected = last
        assert place == expected
        later = mine[made.ts[mine] >= when]
        assert after == (later[0] if later.size else -1)


def test_a_million_levels() -> None:
    count = 1_000_000
    ts = np.arange(count)
    made = nest(np.zeros(count, np.int64), ts, 2 * (count - ts))
    assert made.depth[-1] == count - 1 and (made.parent == ts - 1).all() and not made.overlaps.any()


def test_times_at_the_edge_of_64_bits() -> None:
    edge = 2**62 - 1
    made = nest(*np.asarray([[0, 0, 0], [-edge, -edge, edge], [2 * edge, 1, 0]], np.int64))
    assert made.depth.tolist() == [0, 1, 0]
