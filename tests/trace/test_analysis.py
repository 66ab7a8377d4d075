"""The analyses on files that mean no good: an answer or none, and no harm."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.trace.kineto import HOST, Trace, analysed, rows
from tilewright.trace import analyse
from tilewright.trace.operators.operator_findings import findings
from tilewright.trace.operators.operator_table import read_operator_table

BIG = (1 << 63) - 1
HOSTILE: tuple[Any, ...] = (
    *(0, -1, 1.5, BIG, -BIG, 1 << 70, "", "'); DROP TABLE slice; --", "<script>alert(1)</script>", None, True),
    *([], [BIG, BIG, BIG], {}, {"a": []}, [[[]]], "\ud800", "9" * 400),
)


def summed(connection: Any) -> None:
    """All views can be read, and the classes of each step of each device sum to its time."""
    for view in ("synchronisation", "distance", "what_you_would_win", "attribution", "communication", "straggler"):
        rows(connection, f"FROM {view}")
    for (percent,) in rows(connection, "SELECT sum(percent) FROM accounting GROUP BY step_ts, upid, step_dur"):
        assert percent == pytest.approx(100, abs=0.5)


@pytest.mark.parametrize("seed", range(4))
def test_any_value_anywhere(seed: int, trace: Trace) -> None:
    draw = random.Random(seed)
    trace.step(0, 0, 1500)
    for at in range(0, 1500, 50):
        trace.frame(f"train.py({at}): step", at, at + 49)
        trace.operator("aten::mm", at + 1, at + 40, dims=[[4, 4], [4, 4]])
        trace.launch(at + 2, at + 10, at + 60)
        trace.call("cudaStreamSynchronize", at + 5, at + 30)
    for event in draw.sample(trace.events, len(trace.events) // 2):
        args = event.get("args", {})
        key = draw.choice([*event, *args])
        (event if key in event else args)[key] = draw.choice(HOSTILE)
    trace.header["deviceProperties"] = draw.choice([*HOSTILE, trace.header["deviceProperties"]])
    summed(trace.analysed())


def test_times_at_the_ends_of_the_range(trace: Trace) -> None:
    trace.step(0, 0, 100)
    trace.launch(5, 10, 60)
    for ts, dur in ((9.2e15, 9e15), (-9e15, 1), (0, 9.2e15), (9e15, 0)):
        event = {"ph": "X", "name": "k", "ts": ts, "dur": dur}
        trace.events.append(event | {"cat": "kernel", "pid": 0, "tid": 7, "args": {"correlation": 1, "device": 0}})
        trace.events.append(event | {"cat": "cuda_runtime", "pid": trace.pid, "tid": HOST, "args": {"correlation": 1}})
        trace.events.append(event | {"cat": "user_annotation", "name": "ProfilerStep#9", "pid": trace.pid, "tid": HOST})
    summed(trace.analysed())


def test_launches_on_very_many_levels(trace: Trace) -> None:
    """2,000 operators in each other with a launch in each: a context for a thousand levels, and no more."""
    levels = 2000
    for level in range(levels):
        trace.operator(f"op{level}", level, 3 * levels - level)
        trace.call("cudaLaunchKernel", level + 0.25, level + 0.5)
        trace.work(20_000 + level, 20_000 + level + 1, level + 1)
    found = trace.rows("SELECT count(*), count(operator), max(operator_id) FROM device_slice")
    assert found[0][0] == levels and 900 <= found[0][1] <= 1001


def test_events_without_a_name(trace: Trace) -> None:
    """They count like all others; nothing is called by no name at all."""
    trace.step(0, 0, 100)
    trace.operator("aten::mm", 0, 40)
    trace.launch(5, 10, 60)
    trace.operator("alone", 50, 90)
    for event in trace.events:
        if event["ph"] == "X" and event["cat"] in ("cpu_op", "kernel", "cuda_runtime"):
            del event["name"]
    connection = trace.analysed()
    summed(connection)
    assert rows(connection, "SELECT operator, device_ns FROM operator_distance") == [("(no name)", 50_000)]
    sums = rows(connection, "SELECT sum(cpu_self)::BIGINT, sum(device_self)::BIGINT FROM operator_time")
    assert sums == [(100_000, 50_000)]
    assert findings(read_operator_table(connection))


def test_a_range_that_begins_with_the_last_step_and_outlasts_it(trace: Trace) -> None:
    """It is around the step and not cut by it; each was once taken to lie in the other. Nor is an operator cut."""
    trace.slice("user_annotation", "all", 0, 200)
    trace.step(0, 0, 100)
    trace.operator("aten::mm", 10, 40)
    trace.operator("beyond", 60, 120)
    found = dict(trace.rows("SELECT name, cpu_total FROM operator_time"))
    assert found == {"all": 200_000, "ProfilerStep*": 100_000, "aten::mm": 30_000, "beyond": 60_000}


def test_a_bare_file(tmp_path: Path) -> None:
    path = tmp_path / "bare.json"
    path.write_text(json.dumps([{"ph": "X", "name": "a", "ts": 0, "dur": 1, "pid": 1, "tid": 1}]))
    summed(analysed([path]))


def test_neither_a_second_analysis_nor_perfettos_division_changes_a_view(trace: Trace) -> None:
    trace.step(0, 0, 100)
    trace.operator("aten::mm", 0, 40, dims=[[40, 40], [40, 40]])
    trace.launch(5, 10, 37, name="ncclDevKernel_AllReduce(x)")
    trace.launch(6, 30, 61)
    trace.call("cudaStreamSynchronize", 7, 63)
    connection = trace.analysed()
    views = ("accounting", "step_account", "synchronisation", "distance", "what_you_would_win", "communication", "wave")

    def content() -> list[list[str]]:
        return [sorted(map(str, rows(connection, f"FROM {view}"))) for view in views]

    connection.execute("SET integer_division = false")
    before = content()
    analyse(connection)
    assert content() == before
    connection.execute("SET integer_division = true")
    assert content() == before
