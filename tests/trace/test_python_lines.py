"""Lines that a profile followed: operators of a real profile against their source, and headers made to mislead."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trace.kineto import AUTOGRAD, HOST, Trace, analysed, rows
from tilewright.measure.recording.plan import Detail
from tilewright.measure.recording.windows import KinetoWindow

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
    window = KinetoWindow(Detail(), tmp_path / "trace.json")
    window.start()
    for _ in range(3):
        y = net(x)
        loss = (y * y).sum()
        loss.backward()
        z = torch.cos(depth(x, 3))
    window.stop()
    del z
    connection = analysed([tmp_path / "trace.json"])
    found = dict(rows(connection, "SELECT operator, list(DISTINCT source ORDER BY source) FROM distance GROUP BY 1"))
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
    window = KinetoWindow(Detail(stacks=stacks), tmp_path / "trace.json")
    window.start()
    torch.ones(1)
    window.stop()
    connection = analysed([tmp_path / "trace.json"])
    assert bool(rows(connection, "SELECT 1 FROM python_line LIMIT 1")) == stacks


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
    return [line for (line,) in rows(analysed(traces), "SELECT source FROM device_slice ORDER BY file_id")]


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
