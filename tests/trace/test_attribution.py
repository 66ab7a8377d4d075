"""Which operator and which line each kernel is from: on traces by hand, and on recordings of an H200."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trace.kineto import AUTOGRAD, HOST, STREAM, Analysis, Trace, analysed, region, rows
from tilewright.measure.recording.plan import Detail, RecordingPlan
from tilewright.measure.recording.windows import KinetoWindow
from tilewright.trace import analyse

FIXTURES = Path(__file__).parent / "fixtures"


def test_the_innermost_operator_and_frame(trace: Trace) -> None:
    trace.frame("train.py(3): <module>", 0, 100)
    trace.frame("/home/me/model.py(12): forward", 5, 95)
    trace.frame("torch/nn/functional.py(2300): linear", 6, 90)
    trace.operator("aten::linear", 10, 80)
    trace.operator("aten::addmm", 20, 70)
    trace.launch(30, 40, 60)
    found = trace.rows("SELECT operator, source, source_function, attributed_by FROM device_slice")
    assert found == [("aten::addmm", "/home/me/model.py:12", "forward", "launch")]


def test_generated_code_and_libraries_are_not_the_users(trace: Trace) -> None:
    trace.frame("train.py(7): step", 0, 100)
    generated = "/tmp/torchinductor_me/ab/c3k4yl3tujcixxvd5uikqyklalomijtcbn4pgb76bqpbl65ulw7v.py(40): call"
    for depth, name in enumerate((generated, "/usr/lib/python3.12/contextlib.py(80): inner", "triton/jit.py(9): run")):
        trace.frame(name, 1 + depth, 90 - depth)
    trace.operator("triton_poi_fused_add_0", 10, 80)
    trace.launch(30, 40, 60)
    assert trace.rows("SELECT operator, source FROM device_slice") == [("triton_poi_fused_add_0", "train.py:7")]


def test_backward_has_the_line_and_the_ranges_of_its_forward(trace: Trace) -> None:
    trace.step(0, 0, 300)
    trace.frame("model.py(8): forward", 5, 100)
    trace.slice("user_annotation", "layer mlp", 6, 90)
    trace.operator("aten::addmm", 20, 70)
    trace.launch(30, 40, 60)
    trace.operator("autograd::engine::evaluate_function: AddmmBackward0", 120, 200, AUTOGRAD)
    trace.operator("AddmmBackward0", 125, 160, AUTOGRAD)
    trace.operator("aten::mm", 130, 150, AUTOGRAD)
    trace.launch(135, 140, 160, thread=AUTOGRAD)
    trace.operator("aten::sum", 170, 190, AUTOGRAD)
    trace.launch(175, 180, 195, thread=AUTOGRAD)
    trace.flow("fwdbwd", 1, (20, HOST), (125, AUTOGRAD))
    assert trace.rows("SELECT operator, source, forward_ranges FROM device_slice ORDER BY ts") == [
        ("aten::addmm", "model.py:8", []),
        ("aten::mm", "model.py:8", ["ProfilerStep#0", "layer mlp"]),
        # What follows the node within the engine's range belongs to it.
        ("aten::sum", "model.py:8", ["ProfilerStep#0", "layer mlp"]),
    ]


def test_a_launch_found_by_its_flow_where_correlations_are_missing(trace: Trace) -> None:
    trace.operator("aten::relu", 0, 20)
    trace.slice("cuda_runtime", "cudaLaunchKernel", 5, 8)
    place = {"pid": 0, "tid": STREAM, "ts": 1030}
    trace.events.append({"ph": "X", "cat": "kernel", "name": "relu", "dur": 5, "args": {"device": 0}, **place})
    trace.events.append({"ph": "s", "cat": "ac2g", "id": 9, "name": "ac2g", "pid": trace.pid, "tid": HOST, "ts": 1005})
    trace.events.append({"ph": "f", "bp": "e", "cat": "ac2g", "id": 9, "name": "ac2g", **place})
    assert trace.rows("SELECT operator FROM device_slice") == [("aten::relu",)]


def test_the_same_correlation_in_two_files_is_not_the_same_launch() -> None:
    ranks = [Trace(pid=4000 + rank, rank=rank) for rank in range(2)]
    for trace, name in zip(ranks, ("aten::add", "aten::mul"), strict=True):
        trace.operator(name, 0, 20)
        trace.launch(5, 10, 30)
    found = Analysis(ranks).rows("SELECT operator FROM device_slice ORDER BY file_id")
    assert found == [("aten::add",), ("aten::mul",)]


def test_a_graph_captured_in_the_trace(trace: Trace) -> None:
    trace.frame("model.py(5): forward", 0, 150)
    trace.capture("aten::addmm", "aten::gelu", "aten::native_layer_norm", dims=[[64, 64]])
    for at in (200, 300):
        trace.replay(at, "one", "two", "three")
    assert trace.rows("SELECT name, operator, source, attributed_by FROM device_slice ORDER BY ts") == 2 * [
        ("one", "aten::addmm", "model.py:5", "capture"),
        ("two", "aten::gelu", "model.py:5", "capture"),
        ("three", "aten::native_layer_norm", "model.py:5", "capture"),
    ]


def test_a_graph_captured_in_another_file_and_run_in_the_order_of_its_nodes() -> None:
    """Two captures of one length: the kernels' names tell which was replayed. Branches run in any order."""
    captures, replays = Trace(rank=0), Trace(pid=4001, rank=1)
    captures.capture("aten::addmm", "aten::gelu", "aten::native_layer_norm", dims=[[64, 64]])
    captures.call("cudaStreamBeginCapture", 201, 202)
    for at, name in zip((210, 240, 270), ("aten::tanh", "aten::_softmax", "aten::add"), strict=True):
        captures.operator(name, at, at + 20)
        captures.call("cudaLaunchKernel", at + 5, at + 8)
    captures.call("cudaStreamEndCapture", 310, 315)
    number = replays.call("cudaGraphLaunch", 0, 5)
    kernels = ("sm90_xmma_gemm_bf16bf16_tn", "at::native::GeluCUDAKernelImpl", "vectorized_layer_norm_kernel")
    # The last node of the capture ran first.
    for at, node in zip((10, 30, 50), (2, 0, 1), strict=True):
        replays.work(at, at + 10, number, name=kernels[node], **{"graph node id": 7_000 + node})
    found = Analysis([captures, replays]).rows("SELECT operator, attributed_by FROM device_slice ORDER BY ts")
    assert found == [(f"aten::{name}", "capture") for name in ("native_layer_norm", "addmm", "gelu")]


def test_a_recorded_replay_is_explained_by_the_capture_of_another_recording() -> None:
    """Three blocks on an H200; the graph was captured before the first recording began, and within the second."""
    connection = analysed(FIXTURES / f"graph_{name}.json.gz" for name in ("replayed", "captured"))
    known = rows(connection, "SELECT what, percent FROM attribution WHERE file_id = 0 ORDER BY what")
    assert known == [("bytes", 100), ("operator", 100), ("source line", 100), ("verdict", 100)]
    floors = rows(
        connection,
        """SELECT file_id, operator, calls, floor_us FROM operator_distance
           WHERE attributed_by = 'capture' ORDER BY file_id, operator, floor_us""",
    )
    assert [row[1:] for row in floors if row[0] == 0] == [row[1:] for row in floors if row[0] == 1]


def test_a_replay_without_its_capture_has_the_operators_of_an_eager_file() -> None:
    eager, replays = Trace(rank=0), Trace(pid=4001, rank=1)
    eager.operator("aten::tanh", 0, 20, dims=[[64, 64]])
    eager.launch(5, 30, 40, name="mine")
    replays.replay(200, "mine", "at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float> >")
    found = Analysis([eager, replays]).rows("SELECT operator, attributed_by, operator_id FROM device_slice ORDER BY ts")
    assert [row[:2] for row in found[1:]] == [("aten::tanh", "same kernel"), ("aten::add", "name")]
    assert found[1][2] == found[0][2]


def test_a_graph_of_another_length_is_not_the_captured_one(trace: Trace) -> None:
    trace.capture("aten::gelu")
    trace.replay(200, "one", "two")
    assert trace.rows("SELECT DISTINCT operator, attributed_by FROM device_slice") == [(None, "graph")]


def test_a_graph_whose_kernels_ran_elsewhere_or_have_telling_names(trace: Trace) -> None:
    trace.operator("aten::my_own", 0, 20)
    trace.launch(5, 10, 30, name="mine")
    trace.replay(200, "mine", "sm90_xmma_gemm_bf16bf16_tn", "what is this")
    assert trace.rows("SELECT name, operator, attributed_by FROM device_slice ORDER BY ts") == [
        ("mine", "aten::my_own", "launch"),
        ("mine", "aten::my_own", "same kernel"),
        ("sm90_xmma_gemm_bf16bf16_tn", "matrix product", "name"),
        ("what is this", None, "graph"),
    ]


@pytest.mark.parametrize("name", ["block_eager", "block_inductor"])
def test_every_kernel_of_a_training_step_on_an_h200(name: str) -> None:
    connection = analysed([FIXTURES / f"{name}.json.gz"])
    shares = dict(rows(connection, "SELECT what, percent FROM attribution"))
    assert shares.keys() == {"operator", "source line", "bytes", "verdict"}
    assert min(shares.values()) >= 98
    # Kineto's own correlation with the operator is another way to the same answer.
    differing = rows(
        connection,
        """SELECT count(*)
           FROM device_slice d
           JOIN slice work ON work.id = d.slice_id JOIN arg_set a ON a.arg_set_id = work.arg_set_id
           JOIN slice op ON op.id = d.operator_id JOIN arg_set b ON b.arg_set_id = op.arg_set_id
           WHERE (a.args->>'$."External id"') IS DISTINCT FROM (b.args->>'$."External id"')""",
    )
    assert differing == [(0,)]
    for (total,) in rows(connection, "SELECT sum(percent) FROM accounting GROUP BY step_ts"):
        assert total == pytest.approx(100, abs=1e-9)


def test_a_step_of_tilewrights_own_kernels_with_the_program_they_are_from() -> None:
    """Without the program, a region's kernels are known by name, and their cost is not."""
    connection = analysed([FIXTURES / "block_tilewright.json.gz"])
    shares = dict(rows(connection, "SELECT what, percent FROM attribution"))
    assert shares["operator"] >= 98 and shares["source line"] >= 98
    assert 80 < shares["bytes"] < 90
    unknown = rows(connection, "SELECT DISTINCT operator FROM operator_distance WHERE provenance = 'unknown'")
    names = [name for (name,) in unknown]
    assert names and all(name.startswith(("forward", "backward")) and not name.endswith("_after") for name in names)
    for name in names:
        connection.execute(region(name))
    analyse(connection)
    shares = dict(rows(connection, "SELECT what, percent FROM attribution"))
    assert min(shares.values()) >= 98
    # Each region is called once a step, whether or not a second kernel sums up its columns.
    calls = rows(connection, "SELECT DISTINCT calls FROM operator_distance WHERE attributed_by = 'region'")
    assert calls == [(3,)]


HERE = Path(__file__).name


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(64, 64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x @ self.weight
        return torch.tanh(x)


def depth(x: torch.Tensor, n: int) -> torch.Tensor:
    if n:
        x = torch.sin(depth(x, n - 1))
    return x


def test_operators_have_their_very_line(tmp_path: Path) -> None:
    net, x = Net(), torch.ones(64, 64)
    window = KinetoWindow(RecordingPlan(), tmp_path / "trace.json")
    window.start()
    for _ in range(3):
        y = net(x)
        loss = (y * y).sum()
        loss.backward()
        z = torch.cos(depth(x, 3))
    window.stop()
    del z
    analysis = Analysis([tmp_path / "trace.json"])
    found = dict(analysis.rows("SELECT operator, list(DISTINCT source ORDER BY source) FROM distance GROUP BY 1"))
    of = {
        "aten::mm": "x = x @ self.weight",
        "aten::tanh": "return torch.tanh(x)",
        "aten::tanh_backward": "return torch.tanh(x)",
        "aten::sum": "loss = (y * y).sum()",
        "aten::cos": "z = torch.cos(depth(x, 3))",
        "aten::sin": "x = torch.sin(depth(x, n - 1))",
    }
    source = Path(__file__).read_text().splitlines()
    lines = {name: [text.strip() for text in source].index(text) + 1 for name, text in of.items()}
    for name, line in lines.items():
        assert [Path(place).name for place in found[name]] == [f"{HERE}:{line}"], name


@pytest.mark.parametrize("stacks", [True, False])
def test_without_stacks_nothing_is_followed(tmp_path: Path, stacks: bool) -> None:
    window = KinetoWindow(RecordingPlan(detail=Detail(stacks=stacks)), tmp_path / "trace.json")
    window.start()
    torch.ones(1)
    window.stop()
    analysis = Analysis([tmp_path / "trace.json"])
    assert bool(analysis.rows("SELECT 1 FROM python_line LIMIT 1")) == stacks


BASE_NS = 1_790_000_000_000_000_000


def told(at_us: Sequence[float], which: list[int], thread: int) -> dict[str, Any]:
    """As `LineTracer.stop` writes it; times in µs as those of `Trace`, which begins at 1000."""
    times = [BASE_NS + round((1000 + at) * 1000) for at in at_us]
    since = [later - earlier for earlier, later in zip([0, *times], times, strict=False)]
    places = [["/home/me/train.py", "step", 12], ["/home/me/train.py", "step", 13], ["/home/me/other.py", "step", 5]]
    return {"thread": thread, "places": places, "since": since, "which": which}


def lines_found(*headers: Any) -> list[str]:
    """One process per header: the line of an operator that runs from 20 to 80 µs in `train.py(10): step`."""
    traces = [Trace(pid=4000 + rank, rank=rank) for rank in range(len(headers))]
    for trace, lines in zip(traces, headers, strict=True):
        trace.frame("train.py(10): step", 0, 100)
        trace.operator("aten::mm", 20, 80)
        trace.launch(30, 40, 60)
        trace.header |= {"baseTimeNanoseconds": BASE_NS, "tilewright lines": lines}
    return [line for (line,) in Analysis(traces).rows("SELECT source FROM device_slice ORDER BY file_id")]


def test_the_line_reached_last() -> None:
    reached = [
        ([5, 15, 90], [0, 1, 0], "train.py:13"),
        ([5, 15], [1, 0], "train.py:12"),
        # A line of another file, or none, and the frame says where it is.
        ([5, 15], [0, 2], "train.py:10"),
        ([5, 15], [0, -1], "train.py:10"),
        ([90], [0], "train.py:10"),
        ([], [], "train.py:10"),
    ]
    assert lines_found(*(told(at, which, HOST) for at, which, _ in reached)) == [line for _, _, line in reached]


def test_a_header_made_to_mislead_adds_nothing() -> None:
    good = told([5], [0], HOST)
    misleading = [
        *(None, 7, "lines", [], {}, {"thread": 1}),
        told([5], [9], HOST),
        told([5], [0, 0], HOST),
        told([1e15], [0], HOST),
        *(told([5], [0], thread) for thread in (12345, 2**70, 2**300, -1)),
        good | {"places": [["a"]]},
        good | {"places": [["\x00", None, 2**70]]},
        good | {"since": ["soon"]},
        good | {"since": [float("nan")]},
    ]
    assert lines_found(*misleading) == ["train.py:10"] * len(misleading)


@pytest.mark.parametrize(
    ("within", "line"), [("autograd::engine::evaluate_function: X", "mine/train.py:12"), ("x", None)]
)
def test_gradients_added_up_on_autograds_thread(trace: Trace, within: str, line: str | None) -> None:
    trace.frame("mine/train.py(10): step", 0, 100)
    trace.operator(within, 20, 80, AUTOGRAD)
    trace.launch(30, 40, 60, thread=AUTOGRAD)
    trace.header |= {"baseTimeNanoseconds": BASE_NS, "tilewright lines": told([5, 90], [0, 1], HOST)}
    assert trace.rows("SELECT source FROM device_slice") == [(line,)]


def test_frames_at_the_ends_of_time(trace: Trace) -> None:
    for at in (2000 - 2**62 // 1000, 0, 2**62 // 1000 - 2000):
        trace.frame("train.py(10): step", at, at + 100)
        trace.operator("aten::mm", at + 20, at + 80)
    trace.header |= {"baseTimeNanoseconds": BASE_NS, "tilewright lines": told([5], [0], HOST)}
    assert trace.rows("SELECT count(*) FROM slice") == [(6,)]


def test_a_frame_that_ran_when_the_profiler_started_has_no_line(trace: Trace) -> None:
    trace.frame("train.py(33): <module>", 0, 100)
    trace.frame("train.py(20): main", 0.001, 99)
    trace.frame("torch/profiler/profiler.py(800): start", 0.002, 5)
    trace.frame("train.py(7): step", 6, 50)
    trace.operator("aten::mm", 10, 20)
    trace.launch(11, 12, 15)
    trace.operator("aten::mul", 60, 80)
    trace.launch(61, 62, 65)
    found = trace.rows("SELECT operator, source, source_function FROM device_slice ORDER BY ts")
    assert found == [("aten::mm", "train.py:7", "step"), ("aten::mul", "train.py", "main")]
