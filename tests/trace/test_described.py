"""Light steps, which hold no operators, and the step in every detail that describes them."""

from typing import Any

import pytest

from tests.trace.kineto import AUTOGRAD, Analysis, Trace
from tilewright.trace.operators.operator_table import read_operator_table

MATRIX: dict[str, Any] = {"dims": [[64, 32], [32, 16]]}


def described(kernels: tuple[str, ...] = ("gemm", "gelu")) -> Trace:
    """One step at the pace of a profiler that records everything: an operator a kernel, and a read that waits."""
    trace = Trace()
    trace.header["tilewright description"] = "abc"
    # The first step of a profile pays for its beginning, and is not shown.
    trace.step(3, -3000, -10)
    trace.operator("aten::mm", -2900, -100, **MATRIX)
    trace.launch(-200, -150, -50, name="gemm")
    trace.step(4, 0, 2000)
    trace.frame("train.py(10): step", 1, 1999)
    at = 10
    for name in kernels:
        operator, operands = ("aten::mm", MATRIX) if name == "gemm" else ("aten::gelu", {})
        trace.operator(operator, at, at + 100, **operands)
        trace.launch(at + 50, at + 60, at + 80, name=name)
        at += 200
    trace.operator("aten::item", at, at + 50)
    trace.call("cudaStreamSynchronize", at + 10, at + 30)
    return trace


def light(*steps: tuple[str, ...]) -> Trace:
    """Steps of 100 µs: a kernel of 20 µs every 30 µs, and a read that waits."""
    trace = Trace()
    trace.header["tilewright described by"] = "abc"
    # Before the first step the profiler settles, and the recorder waits for the device.
    trace.launch(4900, 4905, 4990, name="gemm")
    trace.call("cudaDeviceSynchronize", 4901, 4991)
    for number, kernels in enumerate(steps):
        begin = 5000 + 100 * number
        trace.step(6 + number, begin, begin + 100)
        trace.slice("user_annotation", "phase forward", begin, begin + 90)
        for place, name in enumerate(kernels):
            at = begin + 1 + 30 * place
            # Backward launches from another thread than the one that is described.
            trace.launch(at, at + 2, at + 22, name=name, thread=AUTOGRAD if place else 100)
        at = begin + 30 * len(kernels) + 1
        trace.call("cudaStreamSynchronize", at, at + 5)
        trace.slice("user_annotation", "synchronisation at train.py:17", at + 6, at + 7)
    return trace


@pytest.fixture(scope="module")
def both() -> Analysis:
    return Analysis([light(("gemm", "gelu"), ("gemm", "gelu")), described()])


def test_kernels_have_the_operator_and_the_line_of_their_twin(both: Analysis) -> None:
    sql = "SELECT name, operator, source, attributed_by, count(*) FROM device_slice GROUP BY ALL ORDER BY 1"
    assert both.rows(sql) == [
        ("gelu", "aten::gelu", "train.py:10", "description", 2),
        ("gemm", "aten::mm", "train.py:10", "description", 2),
    ]


def test_what_is_timed_is_the_light_steps(both: Analysis) -> None:
    steps = both.rows("SELECT name, dur FROM step ORDER BY ts")
    assert steps == [("ProfilerStep#6", 100_000), ("ProfilerStep#7", 100_000)]
    account = dict(both.rows("SELECT class, ms_per_step FROM step_account"))
    assert account["kernel"] == pytest.approx(0.04)
    assert sum(account.values()) == pytest.approx(0.1)
    assert both.rows("SELECT count(DISTINCT upid) FROM queue_depth") == [(1,)]


def test_a_call_is_priced_by_the_operands_described(both: Analysis) -> None:
    found = both.rows("SELECT calls, device_ns, flops, bytes FROM operator_distance WHERE operator = 'aten::mm'")
    assert found == [(2, 40_000, 2 * 64 * 32 * 16, 4 * (64 * 32 + 32 * 16 + 64 * 16))]
    known = dict(both.rows("SELECT what, percent FROM attribution"))
    assert known["operator"] == known["source line"] == 100


def test_the_operator_table_is_of_the_step_described(both: Analysis) -> None:
    table = both.ask(read_operator_table)
    (product,) = [row for row in table.rows if row.name == "aten::mm"]
    assert (product.calls, product.cpu_total, product.device_self, product.steps) == (1, 100_000, 20_000, 1)
    assert (table.steps, table.steps_ns) == (1, 2_000_000)
    assert (table.timed_steps, table.timed_ns, table.timed_device_ns) == (2, 200_000, 80_000)
    assert table.losses == []


def test_a_wait_is_known_by_its_mark_and_its_call_by_the_description(both: Analysis) -> None:
    found = both.rows("SELECT source, exact, call, calls FROM synchronisation")
    assert found == [("train.py:17", True, "aten::item", 2)]


def test_a_step_that_differs() -> None:
    """A second product finds its operator by the kernel, a kernel that nobody described by its name."""
    analysis = Analysis([light(("gemm", "gemm", "softmax_kernel")), described()])
    found = analysis.rows("SELECT operator, attributed_by FROM device_slice ORDER BY ts")
    assert found == [("aten::mm", "description"), ("aten::mm", "same kernel"), ("aten::_softmax", "name")]


def test_light_steps_alone() -> None:
    analysis = Analysis([light(("gemm", "gelu"))])
    sql = "SELECT operator, attributed_by FROM device_slice WHERE ts >= (SELECT min(ts) FROM step) ORDER BY ts"
    assert analysis.rows(sql) == [(None, "range"), ("aten::gelu", "name")]
    assert sum(ms for (ms,) in analysis.rows("SELECT ms_per_step FROM step_account")) == pytest.approx(0.1)
    assert analysis.ask(read_operator_table).timed_steps == 1


def test_a_description_alone_is_a_trace_like_others() -> None:
    analysis = Analysis([described()])
    assert analysis.rows("SELECT name FROM step ORDER BY ts") == [("ProfilerStep#3",), ("ProfilerStep#4",)]
    assert {how for (how,) in analysis.rows("SELECT attributed_by FROM device_slice")} == {"launch"}


def test_each_rank_has_its_own() -> None:
    traces = []
    for rank in (0, 1):
        timed, told = light(("gemm",)), described(("gemm",))
        for trace, name in ((timed, "tilewright described by"), (told, "tilewright description")):
            trace.header |= {name: f"rank {rank}", "distributedInfo": {"rank": rank, "world_size": 2}}
        traces += [timed, told]
    analysis = Analysis(traces)
    assert analysis.rows("SELECT file_id, described_by FROM description ORDER BY 1") == [(0, 1), (2, 3)]
    found = analysis.rows("SELECT file_id, operator FROM device_slice ORDER BY 1")
    assert found == [(0, "aten::mm"), (2, "aten::mm")]


def test_replays_in_light_steps_are_calls_of_the_operators_captured() -> None:
    told = Trace()
    told.header["tilewright description"] = "abc"
    told.step(4, 0, 2000)
    told.capture("aten::mm", **MATRIX)
    timed = Trace()
    timed.header["tilewright described by"] = "abc"
    timed.step(6, 5000, 5400)
    for trace, begin in ((told, 200), (timed, 5000)):
        trace.replay(begin + 10, "gemm")
        trace.replay(begin + 100, "gemm")
    analysis = Analysis([timed, told])
    found = analysis.rows("SELECT operator, attributed_by, calls, device_ns, flops FROM operator_distance")
    assert found == [("aten::mm", "description", 2, 20_000, 2 * 64 * 32 * 16)]
