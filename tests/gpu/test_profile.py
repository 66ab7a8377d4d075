"""On a GPU: nothing is lost, device time is what the kernels took, a planted wait is found, NVTX ranges balance."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from tilewright.measure.recording.compilation import Replacements
from tilewright.measure.recording.plan import RecordingPlan
from tilewright.measure.recording.ranges import Ranges, nvtx
from tilewright.measure.recording.recorder import Recorder
from tilewright.profiling.block import profile
from tilewright.store.query import query

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TILEWRIGHT_HOME", str(tmp_path))
    return tmp_path


class Training:
    """A linear layer of 2048 features and AdamW."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(2048, 2048), nn.GELU()).cuda()
        self.rule = torch.optim.AdamW(self.model.parameters())
        self.x = torch.randn(4096, 2048, device="cuda")

    def step(self) -> torch.Tensor:
        self.rule.zero_grad()
        loss = self.model(self.x).square().mean()
        loss.backward()
        self.rule.step()
        return loss


@pytest.mark.parametrize("light", [True, False])
def test_every_kernel_has_its_launch_and_its_operator(home: Path, light: bool) -> None:
    training = Training()
    with profile(wait=2, warmup=1, active=3, light=light) as run:
        for _ in range(8):
            training.step()
    assert run.recording.steps_kept == 3 and bool(run.recording.description) == light
    assert query(run.path, "FROM loss")[1] == []
    ((attributed,),) = query(run.path, "SELECT percent FROM attribution WHERE what = 'operator'")[1]
    assert attributed >= 98
    ((ours, kernels),) = query(
        run.path, "SELECT (SELECT sum(device_self)::BIGINT FROM operator_time), sum(dur)::BIGINT FROM operator_slice"
    )[1]
    assert ours == kernels > 0
    sums = query(run.path, "SELECT sum(percent), count(*) FROM accounting GROUP BY step_ts")[1]
    assert len(sums) == 3 and all(abs(percent - 100) < 1e-6 for percent, _ in sums)


def test_light_steps_hold_no_operators_and_the_same_kernels(home: Path) -> None:
    training = Training()
    with profile(wait=2, warmup=1, active=2) as run:
        for _ in range(8):
            training.step()
    operators = "SELECT count(*) FROM slice JOIN thread_track ON thread_track.id = track_id JOIN thread USING (utid) "
    operators += "JOIN process USING (upid) WHERE category = 'cpu_op' AND file_id "
    assert query(run.path, operators + "IN (SELECT file_id FROM description)")[1] == [(0,)]
    assert query(run.path, operators + "IN (SELECT described_by FROM description)")[1][0][0] > 0
    assert query(run.path, "SELECT DISTINCT attributed_by FROM device_slice")[1] == [("description",)]
    each = "SELECT name, count(*) FROM {} GROUP BY name ORDER BY name"
    timed = query(run.path, each.format("device_slice"))[1]
    assert timed == [(name, 2 * count) for name, count in query(run.path, each.format("operator_slice"))[1]]
    # Host ranges and the profiler use one clock: what a step launches lies in it, and its phases hold most of that.
    inside = """SELECT count(*) FROM device_call JOIN description USING (file_id) JOIN slice AS phase
                ON phase.name LIKE 'phase %' AND device_call.ts BETWEEN phase.ts AND phase.ts + phase.dur
                WHERE device_call.name LIKE '%LaunchKernel%'"""
    ((launches, within),) = query(
        run.path, f"SELECT (SELECT count(*) FROM device_slice WHERE kind = 'kernel'), ({inside})"
    )[1]
    # The loss is computed outside of the model.
    assert within > launches / 2


@pytest.mark.parametrize("light", [True, False])
def test_a_planted_print_is_found(home: Path, light: bool) -> None:
    training = Training()
    with profile(wait=2, warmup=1, active=3, light=light) as run, open(os.devnull, "w") as nowhere:
        for _ in range(8):
            loss = training.step()
            print(loss, file=nowhere)  # planted
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if text.endswith("# planted"))
    places = query(run.path, "SELECT source, exact, call FROM synchronisation ORDER BY waited_ms_per_step DESC")[1]
    source, exact, call = places[0]
    assert source.endswith(f"{Path(__file__).name}:{line}") and exact and call == "print"


@pytest.mark.parametrize("light", [True, False])
def test_every_line_of_a_loop_has_its_kernels(home: Path, light: bool) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.GELU()).cuda()
    compiled = torch.compile(model)
    rule = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(256, 512, device="cuda")
    with profile(wait=2, warmup=1, active=3, light=light) as run:
        for _ in range(8):
            y = compiled(x)  # line: forward
            loss = torch.tanh(y).mean()  # line: loss
            loss.backward()  # line: backward
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # line: clip
            rule.step()  # line: optimizer
    text = Path(__file__).read_text().splitlines()
    lines = {line.partition("# line: ")[2]: number for number, line in enumerate(text, 1) if ")  # line: " in line}
    places: dict[str, set[str]] = {}
    for operator, source in query(run.path, "SELECT DISTINCT operator, source FROM distance")[1]:
        places.setdefault(str(operator), set()).add(str(source))
    known = (
        ("aten::addmm", "forward"),
        ("aten::tanh", "loss"),
        ("aten::tanh_backward", "loss"),
        ("aten::mean", "loss"),
        ("aten::_foreach_norm", "clip"),
        ("aten::_foreach_add_", "optimizer"),
    )
    spelled = {source.rpartition(":")[0] for sources in places.values() for source in sources}
    assert [Path(file).name for file in spelled] == [Path(__file__).name]
    at = {name: f"{min(spelled)}:{number}" for name, number in lines.items()}
    assert {operator: places.get(operator) for operator, _ in known} == {of: {at[name]} for of, name in known}
    # The gradient that backward begins with, and nothing without a line.
    assert at["backward"] in places["aten::fill_"]
    assert set.union(*places.values()) <= set(at.values())


def test_nvtx_ranges_balance() -> None:
    training = Training()
    # The depth of the stack of ranges, before and after.
    before = torch.cuda.nvtx.range_push("outermost")
    with Ranges(Replacements()) as ranges:
        ranges.start(nvtx)
        training.step()
    assert torch.cuda.nvtx.range_pop() == before


def test_nvtx_recordings_leave_no_trace(tmp_path: Path) -> None:
    training = Training()
    recorder = Recorder(RecordingPlan(wait=1, warmup=1, active=2, nvtx=True), tmp_path / "nowhere", by_optimizer=True)
    recorder.start()
    for _ in range(7):
        training.step()
    done = recorder.stop()
    assert done.steps_kept == 2 and done.trace is None
