"""Each operator beside its floor, and what one would win."""

import pytest

from tests.trace.kineto import AUTOGRAD, Analysis, Trace, region
from tilewright.hardware.floor import floor_us
from tilewright.hardware.profiles import profile_for

MIB = 1 << 20
UNKNOWN_DEVICE = {"id": 0, "name": "Abacus 3", "computeMajor": 3, "computeMinor": 0, "numSms": 4}


def add(trace: Trace, at: int, elements: int = 64 * MIB) -> None:
    """As many elements of fp32 and as many again, 768 MiB through DRAM, in 400 µs."""
    trace.operator("aten::add", at, at + 20, dims=[[elements], [elements], []], types=["float", "float", "Scalar"])
    trace.launch(at + 5, at + 10, at + 410, grid=(4096, 1, 1))


def ceilings(device: str, **rates: float) -> str:
    """The statement by which the run knows what was measured on a device, in GB/s."""
    measured = ((kind.replace("_", " "), rate) for kind, rate in rates.items())
    values = ", ".join(f"('{device}', '{kind}', '', {rate}, 'GB/s', 'measured')" for kind, rate in measured)
    return f"INSERT INTO ceiling VALUES {values}"


def test_a_bandwidth_bound_operator(trace: Trace) -> None:
    for at in (0, 600):
        trace.step(at, at, at + 600)
        add(trace, at)
    nbytes = 3 * 4 * 64 * MIB
    h200 = profile_for("h200")
    floor, bound = floor_us(nbytes, 64 * MIB, 0, "float32", nbytes, h200, "pointwise", bytes_written=nbytes // 3)
    assert trace.rows("SELECT operator, calls, bytes, flops, provenance, floor_us, bound FROM distance") == [
        ("aten::add", 2, nbytes, 64 * MIB, "formula", pytest.approx(floor), bound)
    ]
    assert trace.rows("SELECT times_floor, GBps, win_ms_per_step FROM distance") == [
        (pytest.approx(400 / floor), pytest.approx(nbytes / 400e3), pytest.approx((400 - floor) / 1e3))
    ]
    known = trace.rows("SELECT what, percent FROM attribution ORDER BY what")
    assert known == [("bytes", 100), ("operator", 100), ("verdict", 100)]


@pytest.mark.parametrize(
    ("elements", "rates", "floor"),
    [
        (64 * MIB, {"copy": 1000, "read": 1000, "write": 1000}, 768 * MIB / 1e6),
        # 84 MiB are more than an H200's L2 holds.
        (7 * MIB, {"copy": 1000, "read": 1000, "write": 1000, "cache": 4000}, 84 * MIB / 1e6),
        # In a cache 4 MiB are written at 400 GB/s, while 8 are read.
        (MIB, {"cache": 1000, "cache_read": 2000, "cache_write": 400}, 4 * MIB / 400e3),
    ],
)
def test_the_runs_own_ceilings_go_before_the_shipped_ones(
    trace: Trace, elements: int, rates: dict[str, float], floor: float
) -> None:
    trace.step(0, 0, 600)
    add(trace, 0, elements)
    analysis = Analysis([trace], ceilings("NVIDIA H200", **rates))
    assert analysis.rows("SELECT floor_us FROM distance") == [(pytest.approx(floor),)]


@pytest.mark.parametrize(
    ("GBps", "stands_out", "compiled"), [(4400, True, False), (4400, True, True), (2100, False, True)]
)
def test_the_verdict_names_an_operator_that_takes_twice_its_floor(
    trace: Trace, GBps: float, stands_out: bool, compiled: bool
) -> None:
    trace.step(0, 0, 600)
    if compiled:
        trace.slice("user_annotation", "Torch-Compiled Region: 0/0", 0, 590)
    add(trace, 0)
    analysis = Analysis([trace], ceilings("NVIDIA H200", copy=GBps, read=GBps, write=GBps))
    (slow,), *others = analysis.rows("SELECT sentence FROM verdict ORDER BY place")
    if not stands_out:
        assert (
            others == [] and slow.startswith("Nothing stands out") and "all together would save 3 % of the step" in slow
        )
        return
    floor = 768 * MIB / GBps / 1e6
    assert slow == "aten::add takes 67 % of the step, 0.4 ms of 0.6 ms."
    assert others[1][0].startswith("The program is compiled already" if compiled else "torch.compile(model, backend=")
    assert [f"takes {0.4 / floor:.1f} × its floor" in others[0][0], f"{0.4 - floor:.3g} ms less" in others[1][0]] == [
        1,
        1,
    ]


def test_the_ceilings_of_a_device_are_not_the_hosts() -> None:
    trace = Trace(device=UNKNOWN_DEVICE)
    trace.operator("aten::add", 0, 20, dims=[[64 * MIB], [64 * MIB], []], types=["float", "float", "Scalar"])
    rates = [ceilings(device, copy=rate, read=rate, write=rate) for device, rate in (("CPU", 10), ("Abacus 3", 1000))]
    assert Analysis([trace], *rates).rows("SELECT floor_us FROM distance") == [
        (pytest.approx(768 * MIB / 10e3, rel=1e-3),)
    ]


def test_an_unknown_device_has_no_floor() -> None:
    trace = Trace(device=UNKNOWN_DEVICE)
    trace.step(0, 0, 600)
    add(trace, 0)
    found = trace.rows("SELECT provenance, floor_us, verdict, win_ms_per_step FROM distance")
    assert found == [("formula", None, "unknown", None)]


def test_an_unknown_operator_costs_unknown_and_never_zero(trace: Trace) -> None:
    trace.step(0, 0, 100)
    trace.operator("mine::special", 0, 20, dims=[[4]])
    trace.launch(5, 10, 50)
    assert trace.rows("SELECT bytes, flops, provenance, floor_us FROM distance") == [(None, None, "unknown", None)]
    assert "bytes" not in dict(trace.rows("SELECT what, percent FROM attribution"))


def test_shapes_that_no_device_holds(trace: Trace) -> None:
    trace.step(0, 0, 100)
    trace.operator("aten::mm", 0, 20, dims=[[1 << 61, 1 << 61], [1 << 61, 1 << 61]])
    trace.launch(5, 10, 50, grid=(1 << 40, 1 << 40, 1 << 40))
    assert trace.rows("SELECT bytes, provenance FROM distance") == [(None, "unknown")]


def test_a_kernel_that_fills_its_workspace_costs_more_than_the_fill(trace: Trace) -> None:
    trace.step(0, 0, 600)
    trace.operator("aten::mm", 0, 20)
    fill = trace.call("cudaMemsetAsync", 3, 4)
    trace.work(5, 6, fill, name="Memset (Device)", category="gpu_memset", bytes=4)
    trace.launch(5, 10, 400)
    found = trace.rows("SELECT operator, bytes, provenance, verdict FROM distance")
    assert found == [("aten::mm", None, "unknown", "unknown")]


WINS = "SELECT how, operator, ms_per_step FROM what_you_would_win ORDER BY ms_per_step DESC"
RECORDED = """
INSERT INTO recording BY NAME
SELECT 0 AS file_id, 1 AS steps_asked, 1 AS steps_kept, 1 AS steps_seen, 0 AS step_events, 0 AS events,
       0 AS most_events, false AS cut, 1 AS seconds_kept, 1 AS seconds, {} AS bare_us, 1000 AS recorded_us,
       [] AS timed_us, 0 AS workers, true AS shapes, true AS stacks, true AS memory"""


def test_a_kernel_that_the_device_waited_for_is_host_bound(trace: Trace) -> None:
    """It waited 205 µs for its launch; of a step that takes 250 µs bare, 150 of them are the profiler's."""
    trace.step(0, 0, 400)
    trace.operator("aten::relu", 0, 390, dims=[[1024]])
    trace.launch(0, 5, 10)
    trace.operator("aten::exp", 200, 250, dims=[[1024]])
    trace.launch(210, 215, 220)
    analysis = Analysis([trace])
    assert dict(analysis.rows("SELECT operator, verdict FROM distance"))["aten::exp"] == "host-bound"
    assert analysis.rows(WINS)[0] == ("a CUDA graph, or fewer launches", "all of them", pytest.approx(0.205))
    analysis.connection.execute(RECORDED.format(250))
    assert analysis.rows(WINS)[0][2] == pytest.approx(0.055)


def test_pauses_between_queued_kernels_are_not_the_hosts(trace: Trace) -> None:
    trace.step(0, 0, 400)
    correlation = trace.call("cudaGraphLaunch", 1, 5)
    for place in range(3):
        trace.work(10 + 100 * place, 90 + 100 * place, correlation)
    assert dict(trace.rows("SELECT class, dur / 1e3 FROM accounting"))["launch-bound"] == 40
    assert trace.rows("SELECT how, round(ms_per_step, 6) FROM what_you_would_win") == [("fewer, larger kernels", 0.04)]


def test_wins_on_a_host_are_of_the_bare_step(trace: Trace) -> None:
    """Recorded, a step of 400 µs took 1000, of which two operators took 600 and 300 on two threads side by side."""
    trace.step(0, 0, 1000)
    trace.operator("aten::exp", 0, 600, dims=[[1024]])
    trace.operator("aten::relu", 0, 300, AUTOGRAD, dims=[[1024]])
    analysis = Analysis([trace], ceilings("Some CPU", copy=1000, read=1000, write=1000, vector=1, launch=1))
    floors = dict(analysis.rows("SELECT operator, floor_us / 1e3 FROM distance"))
    # Of operators that together take longer than a bare step each has its share.
    for bare_us, scale in ((None, 1), (400, 0.4), (200, 0.2)):
        if bare_us:
            analysis.connection.execute(f"DELETE FROM recording; {RECORDED.format(bare_us)}")
        assert analysis.rows(WINS) == [
            ("at its floor", name, pytest.approx(took * scale - floors[name]))
            for name, took in (("aten::exp", 0.6), ("aten::relu", 0.3))
        ]


def test_a_thread_of_two_cores_computes_at_half_of_their_rate(trace: Trace) -> None:
    trace.step(0, 0, 1000)
    trace.operator("aten::mm", 0, 600, dims=[[512, 512], [512, 512]])
    rates = ceilings("Some CPU", copy=1000, read=1000, write=1000, launch=1, matmul=0.1)
    machine = """INSERT INTO run BY NAME SELECT now()::TIMESTAMP AS created, '' AS command, '' AS target, '' AS "case",
                 MAP {}::MAP(VARCHAR, BIGINT) AS dims, MAP {'cores': '2 of a CPU'} AS machine, '' AS tilewright"""
    floors = []
    for threads in ("1", "5"):
        trace.header["tilewright threads"] = threads
        found = Analysis([trace], rates.replace("''", "'float32'"), machine).rows(
            "SELECT floor_us, bound FROM distance"
        )
        ((floor, bound),) = found
        assert bound == "compute-bound"
        floors.append(floor)
    # And a microsecond to call it.
    assert floors == [pytest.approx(2 * 512**3 / 0.1e6 * times + 1) for times in (2, 1)]


def test_a_region_has_the_cost_and_the_line_of_the_run(trace: Trace) -> None:
    """Two kernels of one region: what sums up its columns runs after it and is no call of its own."""
    trace.step(0, 0, 600)
    trace.operator("CompiledFunction", 0, 100)
    trace.launch(5, 10, 110, name="backward1_gelu_sum")
    trace.launch(15, 110, 120, name="backward1_gelu_sum_after")
    analysis = Analysis([trace], region("backward1_gelu_sum", "model.py:7: y = gelu(x)"))
    sql = "SELECT operator, attributed_by, source, calls, bytes, flops, device_ns FROM operator_distance"
    assert analysis.rows(sql) == [
        ("backward1_gelu_sum", "region", "model.py:7: y = gelu(x)", 1, 384_000_000, 7000, 110_000)
    ]


def test_replays_of_a_captured_graph_are_calls_of_its_operators(trace: Trace) -> None:
    trace.capture("aten::add", dims=[[MIB], [MIB]])
    for at in (200, 300, 400):
        trace.replay(at, "kernel")
    found = trace.rows("SELECT operator, attributed_by, calls, bytes, device_ns FROM operator_distance")
    assert found == [("aten::add", "capture", 3, 12 * MIB, 30_000)]


@pytest.mark.parametrize(("width", "nbytes"), [(MIB, 12 * MIB), (2 * MIB, None)])
def test_a_replay_has_the_operands_of_the_same_kernel_only_if_there_is_one_choice(
    trace: Trace, width: int, nbytes: int | None
) -> None:
    for at, size in ((0, MIB), (100, width)):
        trace.operator("aten::add", at, at + 20, dims=[[size], [size]])
        trace.launch(at + 5, at + 10, at + 30)
    trace.replay(200, "kernel")
    found = trace.rows("SELECT operator, bytes FROM operator_distance WHERE attributed_by = 'same kernel'")
    assert found == [("aten::add", nbytes)]
