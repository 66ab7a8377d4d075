"""The operator table: equal to PyTorch's own, exact on a trace made by hand, and honest about what is lost."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import duckdb
import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from examples.naive_softmax import naive_softmax
from tests.trace.kineto import AUTOGRAD, Trace, analysed
from tilewright.trace.operators.operator_findings import findings
from tilewright.trace.operators.operator_table import OperatorTable, OperatorTime, read_operator_table

FIXTURES = Path(__file__).parent / "fixtures"
MS = 1_000_000


def row(table: OperatorTable, name: str) -> OperatorTime:
    (found,) = [row for row in table.rows if row.name == name]
    return found


def by_hand() -> Trace:
    """Two steps of an outer operator that calls an inner one, which launches; a first call that happens once."""
    trace = Trace()
    for number, begin in ((1, 0), (2, 1000)):
        trace.step(number, begin, begin + 500)
        trace.operator("outer", begin + 10, begin + 110)
        # A frame of Python's between the two operators takes nothing of the time.
        trace.frame("model.py(3): forward", begin + 20, begin + 100)
        trace.operator("inner", begin + 30, begin + 90)
        trace.launch(begin + 40, begin + 120, begin + 150)
        trace.operator("inner", begin + 60, begin + 80)
        trace.launch(begin + 65, begin + 150, begin + 160)
        trace.operator("AddBackward0", begin + 200, begin + 230, AUTOGRAD)
        trace.launch(begin + 210, begin + 220, begin + 260, thread=AUTOGRAD)
    trace.call("cudaGetDeviceProperties", 300, 400)
    return trace


def test_every_figure_of_a_trace_made_by_hand(tmp_path: Path) -> None:
    table = read_operator_table(by_hand().analysed(tmp_path))
    outer, inner, backward = (row(table, name) for name in ("outer", "inner", "AddBackward0"))
    us = 1000
    assert (outer.calls, outer.cpu_self, outer.cpu_total) == (2, 80 * us, 200 * us)
    assert (outer.device_self, outer.device_total, outer.launches) == (0, 80 * us, 0)
    # The inner one calls itself: self counts both calls, total the outer of the two.
    assert (inner.calls, inner.cpu_self, inner.cpu_total) == (4, (60 - 1 - 1) * 2 * us, 120 * us)
    assert (inner.device_self, inner.device_total, inner.launches) == (80 * us, 80 * us, 4)
    assert (backward.device_self, backward.cpu_self) == (80 * us, 58 * us)
    assert row(table, "cudaLaunchKernel").calls == 6
    assert row(table, "ProfilerStep*").cpu_total == 1000 * us
    assert table.device_ns == 160 * us
    assert table.cpu_ns == sum(row.cpu_self for row in table.rows) == 1060 * us
    assert [row.name for row in table.rows if row.one_off] == ["cudaGetDeviceProperties"]
    assert not table.losses


def test_a_range_around_the_profilers_stop_ends_with_the_last_step(tmp_path: Path) -> None:
    trace = by_hand()
    trace.slice("user_annotation", "Optimizer.step#SGD.step", 1450, 9000)
    table = read_operator_table(trace.analysed(tmp_path))
    assert row(table, "Optimizer.step#SGD.step").cpu_total == 50_000
    assert table.cpu_ns == 1060_000


def test_words(tmp_path: Path) -> None:
    said = findings(read_operator_table(by_hand().analysed(tmp_path)))
    assert "(50.0 %): together 100.0 % of the 0.16 ms of device time" in said[0]
    assert "of the 0.20 ms of outer on the host, 0.08 ms are its own and the rest is in inner 0.12 ms" in said[1]
    assert said[2] == (
        "6 launches take 6.00 µs of host time, 0.6 % of it and 1.00 µs each. "
        "The device is at work for 0.08 ms of the 0.75 ms that a step takes (2 recorded steps)."
    )
    assert said[3].startswith("Once, and of no weight in a long run: cudaGetDeviceProperties (0.10 ms)")
    assert "The device is at work for 10.7 %" in said[4]


def test_words_of_a_host_alone(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(1, 0, 1500)
    trace.operator("outer", 10, 210)
    trace.operator("inner", 30, 150)
    said = findings(read_operator_table(trace.analysed(tmp_path)))
    assert said[1] == (
        "On the host inner takes 60.0 % of outer (0.12 ms of 0.20 ms), 8.0 % of the recorded step (0.12 ms of 1.50 ms)."
    )


def test_what_inductor_made_for_a_cpu_is_an_operator(tmp_path: Path) -> None:
    graph = "## Call CompiledFxGraph fa6llolwa7dg6wcgfb7sxpssnesm4pj35kx4km33tuyttnyonx3s ##"
    trace = Trace()
    trace.step(1, 0, 100)
    trace.slice("user_annotation", graph, 10, 90)
    trace.frame("/tmp/torchinductor_me/ab/cab.py(40): call", 11, 89)
    trace.operator("aten::mm", 20, 40, dims=[[8, 8], [8, 8]])
    connection = trace.analysed(tmp_path)
    found = row(read_operator_table(connection), graph)
    assert (found.kind, found.cpu_self, found.cpu_total) == ("operator", 60_000, 80_000)
    assert findings(read_operator_table(connection))[0].startswith(
        "Most time goes to CompiledFxGraph fa6llolw… 0.06 ms"
    )
    # Its own time is known, and what it moved is not.
    known = dict(connection.execute("SELECT what, percent FROM attribution").fetchall())
    assert known == {"operator": 100, "bytes": 25}


def test_words_of_nothing() -> None:
    assert findings(OperatorTable([], [], 0, 0, [], 0, 0, 0, 0, 0)) == []


@pytest.fixture(scope="module")
def softmax(tmp_path_factory: pytest.TempPathFactory) -> tuple[duckdb.DuckDBPyConnection, dict[str, tuple[float, ...]]]:
    """The naive softmax 100×5000 ×200 on this CPU: its run, and PyTorch's own table of it."""
    x = torch.randn(100, 5000)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler, record_function("softmax x200"):
        for _ in range(200):
            naive_softmax(x)
    path = tmp_path_factory.mktemp("softmax") / "trace.json"
    profiler.export_chrome_trace(str(path))
    averages = {
        event.key: (event.count, event.self_cpu_time_total, event.cpu_time_total) for event in profiler.key_averages()
    }
    return analysed([path]), averages


def test_equal_to_the_profilers_own_table(
    softmax: tuple[duckdb.DuckDBPyConnection, dict[str, tuple[float, ...]]],
) -> None:
    connection, averages = softmax
    table = read_operator_table(connection)
    assert {row.name for row in table.rows} == set(averages)
    for ours in table.rows:
        calls, own, total = averages[ours.name]
        assert ours.calls == calls
        # Kineto rounds each of its times, and PyTorch adds them up in another order.
        assert ours.cpu_self / 1e3 == pytest.approx(own, rel=0.02, abs=2 * calls * 1e-3)
        assert ours.cpu_total / 1e3 == pytest.approx(total, rel=0.02, abs=2 * calls * 1e-3)


def test_reference_query(softmax: tuple[duckdb.DuckDBPyConnection, dict[str, tuple[float, ...]]]) -> None:
    """The mean of `aten::exp` in seconds, and its share in its parent range and in the trace."""
    connection, averages = softmax
    calls, own, _ = averages["aten::exp"]
    (mean,) = connection.execute("SELECT AVG(dur)/1e9 FROM slice WHERE name='aten::exp'").fetchall()[0]
    assert mean == pytest.approx(own / calls / 1e6, rel=0.02)
    shares = """
        WITH child AS (SELECT parent_id, sum(dur) AS dur FROM slice WHERE name = 'aten::exp' GROUP BY parent_id)
        SELECT parent.name, 1e0 * child.dur / parent.dur, 1e0 * child.dur / trace_dur()
        FROM child JOIN slice AS parent ON parent.id = child.parent_id"""
    ((parent, of_parent, of_trace),) = connection.execute(shares).fetchall()
    assert parent == "softmax x200"
    assert of_parent == pytest.approx(own / averages[parent][2], rel=0.02)
    assert 0 < of_trace <= of_parent < 1
    ours = row(read_operator_table(connection), "aten::exp")
    assert ours.cpu_total / row(read_operator_table(connection), parent).cpu_total == pytest.approx(of_parent, rel=1e-6)


def test_gpu_figures_equal_the_table_that_pytorch_printed() -> None:
    """`key_averages().table()` of the very profile that the fixture is, on an H200, in microseconds."""
    table = read_operator_table(analysed([FIXTURES / "softmax200.json.gz"]))
    printed = {
        "aten::max": (1964, 2925, 3541), "aten::sum": (1476, 2432, 2208), "aten::div": (1025, 1937, 576.383),
        "aten::sub": (1068, 1973, 559.135), "aten::exp": (879.329, 1741, 322.012),
        "cudaLaunchKernel": (4461, 4461, 0),
    }  # fmt: skip
    for name, (own, total, device) in printed.items():
        found = row(table, name)
        assert found.cpu_self / 1e3 == pytest.approx(own, rel=1e-3)
        assert found.cpu_total / 1e3 == pytest.approx(total, rel=1e-3)
        assert found.device_self / 1e3 == pytest.approx(device, rel=1e-3)
    assert table.device_ns / 1e3 == pytest.approx(7207, rel=1e-3)


@pytest.mark.parametrize("name", ["block_eager", "block_inductor", "block_tilewright", "block_cudagraph", "syncs"])
def test_no_device_time_is_left_out(name: str) -> None:
    connection = analysed([FIXTURES / f"{name}.json.gz"])
    table = read_operator_table(connection)
    ((work,),) = connection.execute("SELECT sum(dur)::BIGINT FROM device_slice").fetchall()
    assert table.device_ns == work > 0
    assert all(0 <= row.cpu_self <= max(row.cpu_total, row.cpu_self) for row in table.rows)


def test_lost_events_are_found(tmp_path: Path) -> None:
    document = json.loads(gzip.decompress((FIXTURES / "softmax10_stack.json.gz").read_bytes()))
    assert not read_operator_table(analysed([FIXTURES / "softmax10_stack.json.gz"])).losses
    events = document["traceEvents"]
    kernels = [event for event in events if event.get("cat") == "kernel"]
    launches = [event for event in events if event["name"] == "cudaLaunchKernel"]
    for lost, what in ((kernels[3:6], "launches whose work"), (launches[7:8], "pieces of device work whose launch")):
        path = tmp_path / f"{len(lost)}.json"
        gone = {(event["cat"], event["args"]["correlation"]) for event in lost}
        arrows = {(event["args"]["correlation"], "f" if what.startswith("launches") else "s") for event in lost}
        kept = [
            event
            for event in events
            if (event.get("cat"), event.get("args", {}).get("correlation")) not in gone
            and (event.get("id"), event["ph"]) not in arrows
        ]
        path.write_text(json.dumps(document | {"traceEvents": kept}))
        found = read_operator_table(analysed([path])).losses
        assert [(text[: len(what)], count) for text, count, _ in found] == [(what, len(lost))]
