"""Several ranks: who kept whom waiting, with clocks that disagree.

The recorded traces are three steps of two ranks each, a small Transformer under DDP with NCCL on one host's two H200s:
`ddp_host_late` eager, with a host on rank 1 that sleeps for 3 ms before each step, and `ddp_inductor` compiled. What
operators were given is left out of the files.
"""

import gzip
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pytest

from tests.trace.kineto import Analysis, Trace, analysed, rows

FIXTURES = Path(__file__).parent / "fixtures"
RECORDED = ("ddp_host_late", "ddp_inductor")
STEPS, BUCKETS = 3, 5
ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"


def rank(number: int, begins: list[int], ends: list[int], clock_ahead: int = 0) -> Trace:
    """A collective from each of `begins` to each of `ends`, and a kernel over half of the first one."""
    trace = Trace(pid=4000 + number, rank=number)
    trace.step(0, clock_ahead, 1000 + clock_ahead)
    for begin, end in zip(begins, ends, strict=True):
        at = begin + clock_ahead
        trace.launch(at - 20, at, end + clock_ahead, name=ALL_REDUCE, stream=20, **{"Process Group Name": "0"})
    middle = (begins[0] + ends[0]) / 2 + clock_ahead
    trace.launch(begins[0] + clock_ahead - 10, begins[0] + clock_ahead, middle)
    return trace


OVERLAP = "SELECT collectives, communication_ms, exposed_ms, hidden_percent FROM communication"


def test_overlap_of_compute_and_communication() -> None:
    assert rank(0, [100, 300], [200, 400]).rows(OVERLAP) == [(2, 0.2, 0.15, pytest.approx(25))]
    # From 100 to 300 µs two at once for the half of it, and a kernel over the first 50.
    two_streams = rank(0, [100], [200])
    two_streams.launch(110, 150, 300, name=ALL_REDUCE, stream=21)
    assert two_streams.rows(OVERLAP) == [(2, 0.2, 0.15, pytest.approx(25))]


def test_a_straggler_whose_clock_is_ahead() -> None:
    """Rank 1 comes 60, 10 and 0 µs after rank 0, which it does not show: its clock is 5 ms ahead."""
    ends = [200, 400, 600]
    ranks = [rank(0, [100, 300, 500], ends), rank(1, [160, 310, 500], ends, clock_ahead=5000)]
    sql = "SELECT rank, waited_ms, caused_ms, at_work_percent FROM straggler ORDER BY rank"
    # Its device had nothing to do: its host launched late.
    assert Analysis(ranks).rows(sql) == [(0, pytest.approx(0.07), 0, None), (1, 0, pytest.approx(0.07), 0)]


def test_a_straggler_whose_device_is_at_work() -> None:
    """Rank 1 comes 60 µs late; a kernel takes 45 of them."""
    first, second = rank(0, [100], [200]), rank(1, [160], [200])
    second.launch(90, 100, 145)
    found = Analysis([first, second]).rows("SELECT rank, caused_ms, at_work_percent FROM straggler WHERE caused_ms > 0")
    assert found == [(1, pytest.approx(0.06), pytest.approx(75))]
    assert first.rows("FROM straggler") == [], "one rank has nobody to wait for"


@cache
def recorded(name: str) -> tuple[duckdb.DuckDBPyConnection, list[list[dict[str, Any]]]]:
    """Both ranks of a recording, analysed, and the events of each file."""
    paths = [FIXTURES / f"{name}_rank{number}.json.gz" for number in (0, 1)]
    events = [json.loads(gzip.decompress(path.read_bytes()))["traceEvents"] for path in paths]
    return analysed(paths), events


def kernels(events: list[dict[str, Any]], collective: bool) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Start and end in microseconds of each collective, or of every other kernel, by their start."""
    found = [event for event in events if event.get("cat") == "kernel"]
    chosen = [event for event in found if event["name"].startswith("nccl") == collective]
    return np.array(sorted((event["ts"], event["ts"] + event["dur"]) for event in chosen)).T


def covered(starts: Any, ends: Any, but: Any = ((), ())) -> float:
    """How long at least one interval lasts, without the intervals of `but`: by counting from edge to edge."""
    edges = np.unique(np.concatenate([starts, ends, *but]))
    middles, lengths = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    inside, outside = (
        np.array([np.any((np.asarray(low) < at) & (np.asarray(high) > at)) for at in middles])
        for low, high in ((starts, ends), but)
    )
    return float(lengths[inside & ~outside].sum())


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_communication(name: str) -> None:
    connection, events = recorded(name)
    found = rows(connection, "SELECT rank, collectives, communication_ms, exposed_ms FROM communication ORDER BY rank")
    for (number, count, total, exposed), of_rank in zip(found, events, strict=True):
        starts, ends = kernels(of_rank, collective=True)
        assert count == len(starts) == STEPS * BUCKETS, number
        assert total == pytest.approx((ends - starts).sum() / 1e3)
        assert exposed == pytest.approx(covered(starts, ends, kernels(of_rank, collective=False)) / 1e3, abs=1e-3)


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_stragglers(name: str) -> None:
    """One host, one clock: who came last, and by how much, stands in the files, up to the clocks' estimate."""
    connection, events = recorded(name)
    (first, first_end), (second, second_end) = (kernels(of_rank, collective=True) for of_rank in events)
    assert np.abs(first_end - second_end).max() < 20, "a collective does not end on both ranks at once"
    sql = "SELECT waited_ms, caused_ms, clock_ahead_us, came_last FROM straggler ORDER BY rank"
    late = first - second
    for (waited, caused, ahead, last), behind in zip(rows(connection, sql), (late, -late), strict=True):
        assert abs(ahead) < 5
        room = STEPS * BUCKETS * 2 * abs(ahead) / 1e3
        assert caused == pytest.approx(behind.clip(min=0).sum() / 1e3, abs=room)
        assert waited == pytest.approx((-behind).clip(min=0).sum() / 1e3, abs=room)
        assert last == (behind > 0).sum()


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_steps_add_up(name: str) -> None:
    connection, _ = recorded(name)
    found = rows(connection, "SELECT sum(percent) FROM accounting GROUP BY upid, step_ts, step_dur")
    assert len(found) == 2 * STEPS and all(share == pytest.approx(100, abs=0.5) for (share,) in found)


@pytest.mark.parametrize("name", RECORDED)
def test_collectives_have_the_bytes_of_their_messages(name: str) -> None:
    """Two of each element of bf16: given, and received. No ceiling of the link is known, so there is no floor."""
    connection, events = recorded(name)
    sql = "SELECT calls, bytes, flops, floor_us FROM distance WHERE bound = 'communication' AND file_id = ?"
    for file, of_rank in enumerate(events):
        messages = Counter(
            2 * (event["args"]["In msg nelems"] + event["args"]["Out msg nelems"])
            for event in of_rank
            if event.get("cat") == "kernel" and event["name"].startswith("nccl")
        )
        found = connection.execute(sql, [file]).fetchall()
        assert sorted(found) == sorted((calls, nbytes, 0, None) for nbytes, calls in messages.items())


def test_a_host_that_slept() -> None:
    """For 3 ms before each step, on rank 1 alone: its device was idle, and nothing else was the cause."""
    connection, _ = recorded("ddp_host_late")
    sql = "SELECT ms_per_step FROM step_account JOIN process USING (upid) WHERE class = 'idle' ORDER BY process.name"
    awake, asleep = (ms for (ms,) in rows(connection, sql))
    assert 3.0 <= asleep < 3.6 and awake < 0.3
