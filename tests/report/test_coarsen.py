"""Merging keeps every slice in one block, every long slice whole, and every peak of a curve."""

from collections import Counter
from collections.abc import Sequence

import duckdb
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tilewright.report.coarsen import Merged, merge_short, thin

# Row, begin, length.
ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 10_000), st.integers(-1, 500)), max_size=80)
Row = tuple[int, ...]


def merged(rows: Sequence[Row], most: int) -> tuple[Merged, list[Row], list[Row]]:
    """The result of merging, the blocks (row, ts, dur, count, id) and the slices (row, ts, dur, id, block)."""
    with duckdb.connect() as connection:
        connection.execute(
            "CREATE TABLE shown AS SELECT unnest(?::BIGINT[]) AS id, unnest(?::BIGINT[]) AS track_id, "
            "unnest(?::BIGINT[]) AS ts, unnest(?::BIGINT[]) AS dur, 0 AS depth, NULL::BIGINT AS arg_set_id, "
            "NULL::VARCHAR AS span",
            [list(range(len(rows))), *([row[place] for row in rows] for place in range(3))],
        )
        said = merge_short(connection, most)
        blocks = connection.execute("SELECT track_id, ts, dur, count, id FROM block ORDER BY block").fetchall()
        placed = connection.execute("SELECT track_id, ts, dur, id, block FROM placed ORDER BY ALL").fetchall()
    return said, blocks, placed


@settings(deadline=None, max_examples=50)
@given(ROWS, st.integers(1, 20))
def test_blocks_hold_every_slice_once(rows: list[Row], most: int) -> None:
    said, blocks, placed = merged(rows, most)
    assert Counter(block for *_, block in placed) == dict(enumerate(count for *_, count, _ in blocks))
    # Rows, and what stays whole in them, are never merged with others.
    cuts = len({row for row, _, _ in rows}) + sum(dur < 0 for _, _, dur in rows)
    assert len(blocks) <= max(most, most // 2 + 2 * cuts)
    for row, ts, dur, _, block in placed:
        its_row, its_ts, its_dur, count, longest = blocks[block]
        assert its_row == row
        whole = said.whole is not None and said.whole[0] <= ts < said.whole[1]
        if dur >= said.shortest_ns or dur < 0 or whole:
            assert (its_ts, its_dur, count) == (ts, dur, 1)
        else:
            assert its_ts <= ts and ts + dur <= its_ts + its_dur
            assert rows[longest][2] >= dur


def test_few_slices_stay_as_they_are() -> None:
    said, blocks, _ = merged([(0, 5, 2), (0, 9, 0), (1, 5, -1)], 3)
    assert said == (0, None) and [(dur, count) for _, _, dur, count, _ in blocks] == [(2, 1), (0, 1), (-1, 1)]


def test_a_gap_that_can_be_seen_is_kept() -> None:
    _, blocks, _ = merged([(0, ts, 5) for ts in (0, 10, 20, 5_000, 5_010)], 3)
    assert [(ts, dur, count) for _, ts, dur, count, _ in blocks] == [(0, 25, 3), (5_000, 15, 2)]


def test_half_of_what_may_be_drawn_is_the_middle_whole() -> None:
    said, blocks, _ = merged([(0, 10 * place, 4) for place in range(10_000)], 1_000)
    assert said.whole is not None
    middle = [count for _, ts, _, count, _ in blocks if said.whole[0] <= ts < said.whole[1]]
    assert set(middle) == {1} and 490 <= len(middle) <= 500
    assert len(blocks) <= 1_000 and abs(sum(said.whole) / 2 - 50_000) < 100


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**12), st.floats(-1e9, 1e9)), min_size=1, max_size=300), st.integers(4, 40))
def test_thinning_keeps_extremes_and_ends(points: list[tuple[int, float]], most: int) -> None:
    points.sort(key=lambda point: point[0])
    ts, values = np.array([p[0] for p in points]), np.array([p[1] for p in points])
    kept = thin(ts, values, most)
    assert kept.size <= max(most, 4) and (np.diff(kept) > 0).all()
    assert {0, ts.size - 1} <= set(kept.tolist())
    assert values[kept].max() == values.max() and values[kept].min() == values.min()
