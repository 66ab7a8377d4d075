"""Parents, depths and overlaps against a stack walked slice by slice; self times sum to the threads' busy time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.trace.kineto import Trace, rows
from tilewright.trace.events import nesting
from tilewright.trace.events.nesting import PENDING, nest
from tilewright.trace.events.self_time import self_times
from tilewright.trace.flame import flame
from tilewright.trace.operators.operator_table import add_host_calls, read_operator_table

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


def test_a_hundred_thousand_levels() -> None:
    count = 100_000
    ts = np.arange(count)
    made = nest(np.zeros(count, np.int64), ts, 2 * (count - ts))
    assert made.depth[-1] == count - 1 and (made.parent == ts - 1).all() and not made.overlaps.any()


def test_times_at_the_edge_of_64_bits() -> None:
    edge = 2**62 - 1
    made = nest(*np.asarray([[0, 0, 0], [-edge, -edge, edge], [2 * edge, 1, 0]], np.int64))
    assert made.depth.tolist() == [0, 1, 0]


def owners(ts: np.ndarray, end: np.ndarray) -> np.ndarray:
    """By instants: which slice began last of those that are open, the shorter of two that began together."""
    own = np.zeros(len(ts), np.int64)
    order = np.lexsort((-end, ts))
    for instant in range(int(end.max(initial=0))):
        is_open = [place for place in order if ts[place] <= instant < end[place]]
        if is_open:
            own[is_open[-1]] += 1
    return own


def test_a_thousand_random_threads_whatever_overlaps(trace: Trace) -> None:
    random = np.random.default_rng(7)
    busy: dict[int, int] = {}
    for thread in range(1000, 2000):
        number = int(random.integers(1, 30))
        ts = random.integers(0, 60, number)
        end = ts + random.integers(0, 40, number)
        for index, (begun, ended) in enumerate(zip(ts.tolist(), end.tolist(), strict=True)):
            category = ("cpu_op", "user_annotation", "cuda_runtime")[index % 3]
            trace.slice(category, f"slice {index}", begun, ended, thread)
        covered = np.zeros(int(end.max()) + 1, bool)
        for begun, ended in zip(ts, end, strict=True):
            covered[begun:ended] = True
        busy[thread] = int(covered.sum()) * 1000
    connection = trace.analysed()
    # The analysis makes them in a cursor of its own.
    add_host_calls(connection)
    found = rows(
        connection,
        "SELECT tid, sum(self_ns)::BIGINT, min(self_ns) FROM host_call JOIN thread USING (utid) GROUP BY tid",
    )
    assert {tid: total for tid, total, _ in found} == busy
    assert all(least >= 0 for _, _, least in found)
    assert flame(connection, "host").total[0] == sum(busy.values())
    assert read_operator_table(connection).cpu_ns == sum(busy.values())


def test_time_belongs_to_the_slice_that_began_last() -> None:
    random = np.random.default_rng(11)
    for _ in range(300):
        number = int(random.integers(1, 25))
        ts = random.integers(0, 30, number)
        dur = random.integers(0, 20, number)
        nested = nest(np.zeros(number, np.int64), ts, dur)
        own, outer = self_times(nested)
        assert own.tolist() == owners(nested.ts, nested.end).tolist()
        assert (outer < np.arange(number)).all()


def test_a_step_that_ends_within_its_optimizer(trace: Trace) -> None:
    """The optimizer ends the first step, and then itself."""
    trace.step(1, 0, 1000)
    trace.operator("forward", 100, 500)
    trace.slice("user_annotation", "Optimizer.step#SGD.step", 600, 1010)
    trace.operator("add_", 650, 950)
    trace.step(2, 1002, 2000)
    trace.operator("forward", 1100, 1500)
    connection = trace.analysed()
    found = {row.name: (row.cpu_self, row.cpu_total) for row in read_operator_table(connection).rows}
    assert found == {
        "ProfilerStep*": (1000 * (600 - 400 + 998 - 400), 1000 * (1000 + 998)),
        "Optimizer.step#SGD.step": (1000 * (402 - 300), 1000 * 410),
        "forward": (800_000, 800_000),
        "add_": (300_000, 300_000),
    }
    assert sum(own for own, _ in found.values()) == flame(connection, "host").total[0] == 2_000_000
    assert dict(rows(connection, "SELECT name, outer_name FROM operator_in")) == {
        "forward": "ProfilerStep*",
        "Optimizer.step#SGD.step": "ProfilerStep*",
        "add_": "Optimizer.step#SGD.step",
    }
