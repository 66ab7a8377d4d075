"""Merging keeps every slice in one block, every long slice whole, and every peak of a curve."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.report.coarsen import coarsen, thin

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10_000), st.integers(-1, 500)), max_size=80)


@settings(deadline=None)
@given(ROWS, st.integers(1, 20))
def test_blocks_hold_every_slice_once(rows: list[tuple[int, int, int]], most: int) -> None:
    row, ts, dur = (np.array(column, dtype=np.int64) for column in zip(*sorted(rows), strict=True)) if rows else (
        np.zeros(0, dtype=np.int64),
    ) * 3  # fmt: skip
    blocks = coarsen(row, ts, dur, most)
    assert int(blocks.count.sum()) == len(rows)
    np.testing.assert_array_equal(np.bincount(blocks.block_of, minlength=blocks.ts.size), blocks.count)
    # Rows, and what stays whole in them, are never merged with others.
    cuts = np.unique(row).size + int(np.count_nonzero(dur < 0))
    assert blocks.ts.size <= max(most, most // 2 + 2 * cuts)
    for i, block in enumerate(blocks.block_of.tolist()):
        assert blocks.row[block] == row[i]
        whole = blocks.whole is not None and blocks.whole[0] <= ts[i] < blocks.whole[1]
        if dur[i] >= blocks.shortest_ns or dur[i] < 0 or whole:
            assert (blocks.ts[block], blocks.dur[block], blocks.count[block]) == (ts[i], dur[i], 1)
        else:
            assert blocks.ts[block] <= ts[i] and ts[i] + dur[i] <= blocks.ts[block] + blocks.dur[block]
            assert dur[blocks.longest[block]] >= dur[i]


def test_few_slices_stay_as_they_are() -> None:
    row, ts, dur = np.array([0, 0, 1]), np.array([5, 9, 5]), np.array([2, 0, -1])
    blocks = coarsen(row, ts, dur, 3)
    assert blocks.shortest_ns == 0 and blocks.count.tolist() == [1, 1, 1] and blocks.dur.tolist() == [2, 0, -1]


def test_a_gap_that_can_be_seen_is_kept() -> None:
    ts = np.array([0, 10, 20, 5_000, 5_010])
    blocks = coarsen(np.zeros(5, dtype=np.int64), ts, np.full(5, 5), 3)
    assert blocks.ts.tolist() == [0, 5_000] and blocks.dur.tolist() == [25, 15] and blocks.count.tolist() == [3, 2]


def test_half_of_what_may_be_drawn_is_the_middle_whole() -> None:
    ts = np.arange(10_000) * 10
    blocks = coarsen(np.zeros(ts.size, dtype=np.int64), ts, np.full(ts.size, 4), 1_000)
    assert blocks.whole is not None
    middle = (blocks.ts >= blocks.whole[0]) & (blocks.ts < blocks.whole[1])
    assert (blocks.count[middle] == 1).all() and 490 <= np.count_nonzero(middle) <= 500
    assert blocks.ts.size <= 1_000 and abs(sum(blocks.whole) / 2 - 50_000) < 100


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**12), st.floats(-1e9, 1e9)), min_size=1, max_size=300), st.integers(4, 40))
def test_thinning_keeps_extremes_and_ends(points: list[tuple[int, float]], most: int) -> None:
    points.sort(key=lambda point: point[0])
    ts, values = np.array([p[0] for p in points]), np.array([p[1] for p in points])
    kept = thin(ts, values, most)
    assert kept.size <= max(most, 4) and (np.diff(kept) > 0).all()
    assert {0, ts.size - 1} <= set(kept.tolist())
    assert values[kept].max() == values.max() and values[kept].min() == values.min()
