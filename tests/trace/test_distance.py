"""Each operator beside its floor, and what one would win."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trace.kineto import AUTOGRAD, Trace, analysed, rows
from tilewright.hardware.floor import floor_us
from tilewright.hardware.profiles import profile_for

MIB = 1 << 20


def add(trace: Trace, at: int, took: int, elements: int = 64 * MIB) -> None:
    """As many elements of fp32 and as many again: 768 MiB through DRAM."""
    trace.operator("aten::add", at, at + 20, dims=[[elements], [elements], []], types=["float", "float", "Scalar"])
    trace.launch(at + 5, at + 10, at + 10 + took, grid=(4096, 1, 1))


def test_a_bandwidth_bound_operator(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 600)
    trace.step(1, 600, 1200)
    add(trace, 0, 400)
    add(trace, 600, 400)
    connection = trace.analysed(tmp_path)
    found = rows(
        connection,
        """SELECT operator, calls, bytes, flops, provenance, floor_us, bound, times_floor, GBps, win_ms_per_step
           FROM distance""",
    )
    nbytes = 3 * 4 * 64 * MIB
    floor, bound = floor_us(
        nbytes, 64 * MIB, 0, "float32", nbytes, profile_for("h200"), "pointwise", bytes_written=nbytes // 3
    )
    assert found == [
        (
            *("aten::add", 2, nbytes, 64 * MIB, "formula", pytest.approx(floor), bound),
            *(pytest.approx(400 / floor), pytest.approx(nbytes / 400e3), pytest.approx((400 - floor) / 1e3)),
        )
    ]
    known = rows(connection, "SELECT what, percent FROM attribution ORDER BY what")
    assert known == [("bytes", 100), ("operator", 100), ("verdict", 100)]


def test_the_runs_own_ceilings_go_before_the_shipped_ones(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 600)
    add(trace, 0, 400)
    ceilings = ", ".join(
        f"('NVIDIA H200', '{kind}', '', 1000, 'GB/s', 'measured')" for kind in ("copy", "read", "write")
    )
    connection = analysed([trace.write(tmp_path)], f"INSERT INTO ceiling VALUES {ceilings}")
    assert rows(connection, "SELECT floor_us FROM distance") == [(pytest.approx(3 * 4 * 64 * MIB / 1e3 / 1e3),)]


def test_what_a_cache_was_measured_to_read_and_write_prices_a_small_operator(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 600)
    add(trace, 0, 400, elements=MIB)
    ceilings = ", ".join(
        f"('NVIDIA H200', '{kind}', '', {rate}, 'GB/s', 'measured')"
        for kind, rate in (("cache", 1000), ("cache read", 2000), ("cache write", 400))
    )
    connection = analysed([trace.write(tmp_path)], f"INSERT INTO ceiling VALUES {ceilings}")
    # 4 MiB written at 400 GB/s, while 8 are read.
    assert rows(connection, "SELECT floor_us FROM distance") == [(pytest.approx(4 * MIB / 400 / 1e3),)]


def test_the_ceilings_of_a_device_are_not_the_hosts(tmp_path: Path) -> None:
    trace = Trace(device={"id": 0, "name": "Abacus 3", "computeMajor": 3, "computeMinor": 0, "numSms": 4})
    trace.operator("aten::add", 0, 20, dims=[[64 * MIB], [64 * MIB], []], types=["float", "float", "Scalar"])
    ceilings = ", ".join(
        f"('{device}', '{kind}', '', {rate}, 'GB/s', 'measured')"
        for device, rate in (("Some CPU", 10), ("Abacus 3", 1000))
        for kind in ("copy", "read", "write")
    )
    connection = analysed([trace.write(tmp_path)], f"INSERT INTO ceiling VALUES {ceilings}")
    # 768 MiB at the 10 GB/s of the host.
    assert rows(connection, "SELECT floor_us FROM distance") == [(pytest.approx(768 * MIB / 10e3, rel=1e-3),)]


def test_an_unknown_device_has_no_floor(tmp_path: Path) -> None:
    trace = Trace(device={"id": 0, "name": "Abacus 3", "computeMajor": 3, "computeMinor": 0, "numSms": 4})
    trace.step(0, 0, 600)
    add(trace, 0, 400)
    connection = trace.analysed(tmp_path)
    assert rows(connection, "SELECT provenance, floor_us, verdict, win_ms_per_step FROM distance") == [
        ("formula", None, "unknown", None)
    ]


def test_an_unknown_operator_costs_unknown_and_never_zero(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 100)
    trace.operator("mine::special", 0, 20, dims=[[4]])
    trace.launch(5, 10, 50)
    connection = trace.analysed(tmp_path)
    assert rows(connection, "SELECT bytes, flops, provenance, floor_us FROM distance") == [
        (None, None, "unknown", None)
    ]
    assert "bytes" not in dict(rows(connection, "FROM (SELECT what, percent FROM attribution)"))


def test_a_kernel_that_fills_its_workspace_costs_more_than_the_fill(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 600)
    trace.operator("aten::mm", 0, 20)
    fill = trace.call("cudaMemsetAsync", 3, 4)
    trace.work(5, 6, fill, name="Memset (Device)", category="gpu_memset", bytes=4)
    trace.launch(5, 10, 400)
    found = rows(trace.analysed(tmp_path), "SELECT operator, bytes, provenance, verdict FROM distance")
    assert found == [("aten::mm", None, "unknown", "unknown")]


def test_a_kernel_that_the_device_waited_for_is_host_bound(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 400)
    trace.operator("aten::relu", 0, 390, dims=[[1024]])
    trace.launch(0, 5, 10)
    trace.operator("aten::exp", 200, 250, dims=[[1024]])
    trace.launch(210, 215, 220)
    connection = trace.analysed(tmp_path)
    found = dict(rows(connection, "SELECT operator, verdict FROM distance"))
    assert found["aten::exp"] == "host-bound"
    won = rows(connection, "SELECT how, operator, ms_per_step FROM what_you_would_win ORDER BY ms_per_step DESC")
    assert won[0] == ("a CUDA graph, or fewer launches", "all of them", pytest.approx(0.205))


def test_pauses_between_queued_kernels_are_not_the_hosts(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 400)
    correlation = trace.call("cudaGraphLaunch", 1, 5)
    for place in range(3):
        trace.work(10 + 100 * place, 90 + 100 * place, correlation)
    connection = trace.analysed(tmp_path)
    assert dict(rows(connection, "SELECT class, dur / 1e3 FROM accounting"))["launch-bound"] == 40
    assert rows(connection, "SELECT how, round(ms_per_step, 6) FROM what_you_would_win") == [
        ("fewer, larger kernels", 0.04)
    ]


BARE = "UPDATE recording SET bare_us = {}"
RECORDED = "INSERT INTO recording VALUES (0, NULL, 1, 1, 1, 0, 0, 0, false, 1, 1, 400, 1000, true, true, true)"
CEILINGS = [("copy", 1000), ("read", 1000), ("write", 1000), ("vector", 1), ("launch", 1)]
WINS = "SELECT how, operator, ms_per_step FROM what_you_would_win ORDER BY ms_per_step DESC"


def test_wins_on_a_host_are_of_the_bare_step(tmp_path: Path) -> None:
    """Recorded, a step of 400 µs took 1000, of which two operators took 600 and 300 on two threads side by side."""
    trace = Trace()
    trace.step(0, 0, 1000)
    trace.operator("aten::exp", 0, 600, dims=[[1024]])
    trace.operator("aten::relu", 0, 300, AUTOGRAD, dims=[[1024]])
    ceilings = ", ".join(f"('Some CPU', '{kind}', '', {rate}, 'GB/s', 'measured')" for kind, rate in CEILINGS)
    connection = analysed([trace.write(tmp_path)], f"INSERT INTO ceiling VALUES {ceilings}")
    recorded = rows(connection, WINS)
    assert [name for _, name, _ in recorded] == ["aten::exp", "aten::relu"] and recorded[0][2] > 0.59
    connection.execute(RECORDED)
    assert rows(connection, "SELECT recorded_ms, bare_ms, scale FROM bare_step") == [(1, 0.4, 0.4)]
    floors = dict(rows(connection, "SELECT operator, floor_us / 1e3 FROM distance"))
    assert rows(connection, WINS) == [
        ("at its floor", name, pytest.approx(took * 0.4 - floors[name]))
        for name, took in (("aten::exp", 0.6), ("aten::relu", 0.3))
    ]
    # Of operators that together take longer than a bare step each has its share.
    connection.execute(BARE.format(200))
    assert sum(won for _, _, won in rows(connection, WINS)) <= 0.2


def test_what_recording_adds_is_not_to_be_won_from_the_host(tmp_path: Path) -> None:
    """The device waited 205 µs for its launch, 150 of them for the profiler."""
    trace = Trace()
    trace.step(0, 0, 400)
    trace.operator("aten::relu", 0, 390, dims=[[1024]])
    trace.launch(0, 5, 10)
    trace.operator("aten::exp", 200, 250, dims=[[1024]])
    trace.launch(210, 215, 220)
    connection = trace.analysed(tmp_path)
    connection.execute(RECORDED)
    connection.execute(BARE.format(250))
    assert rows(connection, WINS)[0] == ("a CUDA graph, or fewer launches", "all of them", pytest.approx(0.055))


def test_a_region_has_the_cost_and_the_line_of_the_run(tmp_path: Path) -> None:
    """Two kernels of one region: what sums up its columns runs after it and is no call of its own."""
    trace = Trace()
    trace.step(0, 0, 600)
    trace.operator("CompiledFunction", 0, 100)
    trace.launch(5, 10, 110, name="backward1_gelu_backward_sum")
    trace.launch(15, 110, 120, name="backward1_gelu_backward_sum_after")
    region = """INSERT INTO region BY NAME
        SELECT 'backward' AS graph, 'backward1_gelu_backward_sum' AS name, ['a', 'b'] AS members,
               1 AS reads, 1 AS writes, 0 AS unused, 256000000 AS bytes_read, 128000000 AS bytes_written,
               7000 AS flops, 5 AS transcendentals,
               'formula' AS provenance, 'triton' AS language, '' AS source_code"""
    operator = """INSERT INTO operator BY NAME
        SELECT 'backward' AS graph, 'after' AS stage, 1 AS index, 'r' AS name, 'kernel' AS target,
               'pointwise' AS operator_class, [1] AS shape, 'float32' AS dtype, 1 AS reads, 1 AS writes, 0 AS unused,
               1 AS bytes_read, 1 AS bytes_written, 1 AS flops, 0 AS transcendentals, 'formula' AS provenance,
               'backward1_gelu_backward_sum' AS region, 'model.py:7: y = gelu(x)' AS source, [] AS inputs"""
    connection = analysed([trace.write(tmp_path)], region, operator)
    assert rows(
        connection,
        "SELECT operator, attributed_by, source, calls, bytes, flops, provenance, device_ns FROM operator_distance",
    ) == [("backward1_gelu_backward_sum", "region", "model.py:7: y = gelu(x)", 1, 384000000, 7000, "formula", 110_000)]


def test_replays_of_a_captured_graph_are_calls_of_its_operators(tmp_path: Path) -> None:
    trace = Trace()
    trace.call("cudaStreamBeginCapture", 1, 2)
    trace.operator("aten::add", 10, 30, dims=[[MIB], [MIB]])
    trace.call("cudaLaunchKernel", 15, 18)
    trace.call("cudaStreamEndCapture", 110, 115)
    for at in (200, 300, 400):
        trace.work(at + 10, at + 20, trace.call("cudaGraphLaunch", at, at + 5))
    found = rows(
        trace.analysed(tmp_path), "SELECT operator, attributed_by, calls, bytes, device_ns FROM operator_distance"
    )
    assert found == [("aten::add", "capture", 3, 12 * MIB, 30_000)]


@pytest.mark.parametrize(("width", "nbytes"), [(MIB, 12 * MIB), (2 * MIB, None)])
def test_a_replay_has_the_operands_of_the_same_kernel_only_if_there_is_one_choice(
    tmp_path: Path, width: int, nbytes: int | None
) -> None:
    trace = Trace()
    for at, size in ((0, MIB), (100, width)):
        trace.operator("aten::add", at, at + 20, dims=[[size], [size]])
        trace.launch(at + 5, at + 10, at + 30)
    trace.work(210, 220, trace.call("cudaGraphLaunch", 200, 205))
    found = rows(
        trace.analysed(tmp_path), "SELECT operator, bytes FROM operator_distance WHERE attributed_by = 'same kernel'"
    )
    assert found == [("aten::add", nbytes)]


def test_shapes_that_no_device_holds(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 100)
    trace.operator("aten::mm", 0, 20, dims=[[1 << 61, 1 << 61], [1 << 61, 1 << 61]])
    trace.launch(5, 10, 50, grid=(1 << 40, 1 << 40, 1 << 40))
    assert rows(trace.analysed(tmp_path), "SELECT bytes, provenance FROM distance") == [(None, "unknown")]
