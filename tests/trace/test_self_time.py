"""Self times sum to the busy time of the threads, exactly, whatever overlaps."""

import numpy as np

from tests.trace.kineto import Trace, rows
from tilewright.trace.events.nesting import nest
from tilewright.trace.events.self_time import self_times
from tilewright.trace.flame import flame
from tilewright.trace.operators.operator_table import read_operator_table


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
