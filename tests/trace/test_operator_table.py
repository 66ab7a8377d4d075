"""The operator table: equal to PyTorch's own, exact on a trace made by hand, and honest about what is lost."""

from pathlib import Path

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from examples.naive_softmax import naive_softmax
from tests.trace.kineto import AUTOGRAD, Analysis, Trace
from tests.trace.test_distance import RECORDED
from tilewright.trace.operators.operator_findings import findings
from tilewright.trace.operators.operator_table import OperatorTable, OperatorTime, read_operator_table

FIXTURES = Path(__file__).parent / "fixtures"


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


def test_every_figure_of_a_trace_made_by_hand() -> None:
    table = Analysis([by_hand()]).ask(read_operator_table)
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


def test_steps_that_the_recorder_left_out_do_not_count() -> None:
    """Their marks are gone and their events are in the trace, before the first kept step and after the last one."""
    trace = by_hand()
    for begin in (-900, 1600):
        trace.operator("outer", begin, begin + 100)
    analysis = Analysis([trace])
    analysis.connection.execute(RECORDED.format(1000))
    assert row(analysis.ask(read_operator_table), "outer").calls == 2
    # In a trace of another recorder they are a part of what was recorded.
    assert row(Analysis([trace]).ask(read_operator_table), "outer").calls == 4


def test_a_range_around_the_profilers_stop_ends_with_the_last_step() -> None:
    trace = by_hand()
    trace.slice("user_annotation", "Optimizer.step#SGD.step", 1450, 9000)
    table = Analysis([trace]).ask(read_operator_table)
    assert row(table, "Optimizer.step#SGD.step").cpu_total == 50_000
    assert table.cpu_ns == 1060_000


def test_an_operator_that_outlasts_the_last_step_lasts_as_long_as_it_ran() -> None:
    trace = Trace()
    for number in (1, 2):
        trace.step(number, 100 * number, 100 * number + 100)
    trace.operator("aten::a", 210, 510)
    trace.operator("aten::b", 250, 450, AUTOGRAD)
    table = Analysis([trace]).ask(read_operator_table)
    assert [row(table, name).cpu_self for name in ("aten::a", "aten::b")] == [300_000, 200_000]


def test_findings_say_the_figures() -> None:
    said = findings(Analysis([by_hand()]).ask(read_operator_table))
    for sentence, words in zip(
        said,
        (
            "(50.0 %): together 100.0 % of the 0.16 ms of device time",
            "of the 0.20 ms of outer on the host, 0.08 ms are self time and the rest is in inner 0.12 ms",
            "6 launches take 6.00 µs of host time, 0.6 % of it and 1.00 µs each",
            "cudaGetDeviceProperties (0.10 ms)",
            "The device is busy for 10.7 %",
        ),
        strict=True,
    ):
        assert words in sentence
    assert findings(OperatorTable([], [], 0, 0, [], 0, 0, 0, 0, 0)) == []


def test_findings_of_a_host_alone(trace: Trace) -> None:
    trace.step(1, 0, 1500)
    trace.operator("outer", 10, 210)
    trace.operator("inner", 30, 150)
    said = findings(Analysis([trace]).ask(read_operator_table))
    assert "60.0 % of outer (0.12 ms of 0.20 ms), 8.0 % of the recorded step (0.12 ms of 1.50 ms)" in said[1]


def test_what_inductor_made_for_a_cpu_is_an_operator(trace: Trace) -> None:
    graph = "## Call CompiledFxGraph fa6llolwa7dg6wcgfb7sxpssnesm4pj35kx4km33tuyttnyonx3s ##"
    trace.step(1, 0, 100)
    trace.slice("user_annotation", graph, 10, 90)
    trace.frame("/tmp/torchinductor_me/ab/cab.py(40): call", 11, 89)
    trace.operator("aten::mm", 20, 40, dims=[[8, 8], [8, 8]])
    analysis = Analysis([trace])
    found = row(analysis.ask(read_operator_table), graph)
    assert (found.kind, found.cpu_self, found.cpu_total) == ("operator", 60_000, 80_000)
    assert "CompiledFxGraph fa6llolw… 0.06 ms" in findings(analysis.ask(read_operator_table))[0]
    # Its own time is known, and what it moved is not.
    known = dict(analysis.rows("SELECT what, percent FROM attribution"))
    assert known == {"operator": 100, "bytes": 25}


def test_equal_to_the_profilers_own_table(tmp_path: Path) -> None:
    """The naive softmax 100×5000 ×200 on this CPU beside `key_averages()`."""
    x = torch.randn(100, 5000)
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler, record_function("softmax x200"):
        for _ in range(200):
            naive_softmax(x)
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    averages = {event.key: event for event in profiler.key_averages()}
    analysis = Analysis([tmp_path / "trace.json"])
    table = analysis.ask(read_operator_table)
    assert {row.name for row in table.rows} == set(averages)
    for ours in table.rows:
        theirs = averages[ours.name]
        # Kineto rounds each of its times, and PyTorch adds them up in another order.
        rounding = 2 * theirs.count * 1e-3
        assert ours.calls == theirs.count
        assert ours.cpu_self / 1e3 == pytest.approx(theirs.self_cpu_time_total, rel=0.02, abs=rounding)
        assert ours.cpu_total / 1e3 == pytest.approx(theirs.cpu_time_total, rel=0.02, abs=rounding)
    # The mean of an operator in seconds, and its share in its parent range and in the trace.
    shares = """
        WITH child AS (
            SELECT parent_id, sum(dur) AS dur, avg(dur) AS mean FROM slice WHERE name = 'aten::exp' GROUP BY 1)
        SELECT parent.name, child.mean / 1e9, 1e0 * child.dur / parent.dur, 1e0 * child.dur / trace_dur()
        FROM child JOIN slice AS parent ON parent.id = child.parent_id"""
    ((parent, mean, of_parent, of_trace),) = analysis.rows(shares)
    exp, around = averages["aten::exp"], averages["softmax x200"]
    assert parent == "softmax x200" and 0 < of_trace <= of_parent < 1
    assert mean == pytest.approx(exp.self_cpu_time_total / exp.count / 1e6, rel=0.02)
    assert of_parent == pytest.approx(exp.self_cpu_time_total / around.cpu_time_total, rel=0.02)


def test_gpu_figures_equal_the_table_that_pytorch_printed() -> None:
    """`key_averages().table()` of the very profile that the fixture is, on an H200, in microseconds."""
    table = Analysis([FIXTURES / "softmax200.json.gz"]).ask(read_operator_table)
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
    analysis = Analysis([FIXTURES / f"{name}.json.gz"])
    table = analysis.ask(read_operator_table)
    ((work,),) = analysis.rows("SELECT sum(dur)::BIGINT FROM device_slice")
    assert table.device_ns == work > 0
    assert all(0 <= row.cpu_self <= max(row.cpu_total, row.cpu_self) for row in table.rows)


@pytest.mark.parametrize(
    ("lost", "what"), [("kernel", "launches whose work"), ("cudaLaunchKernel", "pieces of device work whose launch")]
)
def test_lost_events_are_found(lost: str, what: str) -> None:
    trace = by_hand()
    trace.events.remove(next(event for event in trace.events if event["name"] == lost))
    ((text, count, _),) = Analysis([trace]).ask(read_operator_table).losses
    assert text.startswith(what) and count == 1
