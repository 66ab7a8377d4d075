"""The recorder: which steps it keeps, what bounds it, and what it leaves behind in the process: nothing."""

import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.modules import module

from tests.waiting import HANG_S
from tilewright.measure.recording import recorder as recorder_module
from tilewright.measure.recording import windows
from tilewright.measure.recording.host_ranges import HostRanges
from tilewright.measure.recording.plan import DESCRIBED_BY, DESCRIPTION, Detail, Recording, RecordingPlan
from tilewright.measure.recording.recorder import Recorder
from tilewright.records.errors import UsageError

LEAN = Detail(shapes=False, stacks=False, memory=False)


def record(plan: RecordingPlan, folder: Path, work: Callable[[], object], steps: int, **options: Any) -> Recording:
    recorder = Recorder(plan, folder, **options)
    recorder.start()
    for _ in range(steps):
        work()
        if not options.get("by_optimizer"):
            recorder.step()
    return recorder.stop()


def names(recording: Recording) -> Counter[str]:
    assert recording.trace is not None
    return Counter(event["name"] for event in json.loads(recording.trace.read_text())["traceEvents"])


def five() -> None:
    x = torch.ones(3)
    for _ in range(5):
        x = x.exp()


def training(by: int = 1) -> Callable[[], None]:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    rule = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        for _ in range(by):
            rule.zero_grad()
            model(torch.ones(3, 4)).sum().backward()
            rule.step()

    return step


def test_keeps_the_steps_of_the_plan(tmp_path: Path) -> None:
    done = record(RecordingPlan(wait=2, warmup=1, active=4, detail=LEAN), tmp_path, five, steps=20)
    found = names(done)
    assert found["aten::exp"] == 20
    # Two bare, one thrown away, one between: the first that is kept is the fifth.
    assert [name for name in found if name.startswith("ProfilerStep#")] == [f"ProfilerStep#{i}" for i in (4, 5, 6, 7)]
    assert (done.steps_kept, done.steps_seen, done.cut) == (4, 20, False)
    assert done.events == sum(found.values())
    assert done.bare_us and done.recorded_us and done.seconds > done.seconds_kept > 0
    assert len(done.timed_us) == 12 and min(done.timed_us) > 0
    assert done.timed_queued_us is None or 0 <= done.timed_queued_us <= sum(done.timed_us)
    assert len(done.recorded_thread_us) == 4 and min(done.recorded_thread_us) > 0
    assert len(done.recorded_queued_us) in (0, 4) and min(done.recorded_queued_us, default=0) >= 0


@pytest.fixture
def as_if_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Light steps without a GPU: the profiler that ought to record devices records this host."""
    real = windows._profiler
    monkeypatch.setattr(recorder_module, "gpu_in_use", lambda: True)
    monkeypatch.setattr(windows, "_profiler", lambda _, detail: real([torch.profiler.ProfilerActivity.CPU], detail))


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_light_steps_are_described_by_the_warmup(tmp_path: Path) -> None:
    done = record(RecordingPlan(wait=2, warmup=2, active=3, detail=LEAN), tmp_path, training(), steps=20)
    assert done.steps_kept == 3 and done.description is not None and done.trace is not None
    light, described = (json.loads(path.read_text()) for path in (done.trace, done.description))
    assert light[DESCRIBED_BY] == described[DESCRIPTION]
    # Two bare, two described, one between, and one in which the profiler settles.
    for document, numbers in ((described, (2, 3)), (light, (6, 7, 8))):
        found = [event for event in document["traceEvents"] if event.get("ph") == "X"]
        steps = [event for event in found if event["name"].startswith("ProfilerStep#")]
        assert [step["name"] for step in steps] == [f"ProfilerStep#{number}" for number in numbers]
        phases = sorted((event for event in found if event["name"].startswith("phase")), key=lambda event: event["ts"])
        kept = [phase for phase in phases if phase["ts"] >= steps[0]["ts"]]
        assert [phase["name"] for phase in kept] == ["phase forward", "phase backward", "phase optimizer"] * len(steps)
        ended = {step["ts"] + step["dur"] for step in steps}
        assert max(phase["ts"] + phase["dur"] for phase in kept) <= max(ended)
    assert done.bare_us and done.recorded_us
    assert done.recorded_us == pytest.approx(sum(step["dur"] for step in steps) / 3, rel=0.5)


@pytest.mark.usefixtures("as_if_on_a_gpu")
def test_steps_are_not_light_where_nothing_describes_them(tmp_path: Path) -> None:
    for plan in (
        RecordingPlan(wait=1, warmup=0, active=1),
        RecordingPlan(wait=1, active=1, light=False),
        RecordingPlan(whole=True),
    ):
        assert record(plan, tmp_path, five, steps=7).description is None
    early = tmp_path / "early"
    early.mkdir()
    assert record(RecordingPlan(wait=1, warmup=2, active=1), early, five, steps=4).description is None
    assert not list(early.iterdir())


@pytest.mark.parametrize(("wait", "warmup", "first"), [(0, 0, 0), (1, 0, 1), (0, 2, 3), (3, 1, 5)])
def test_first_step_kept(tmp_path: Path, wait: int, warmup: int, first: int) -> None:
    done = record(RecordingPlan(wait, warmup, active=1, detail=LEAN), tmp_path, five, steps=10)
    assert names(done)[f"ProfilerStep#{first}"] == 1


def test_a_program_that_ends_early_leaves_no_trace(tmp_path: Path) -> None:
    done = record(RecordingPlan(wait=2, warmup=1, active=3, detail=LEAN), tmp_path, five, steps=3)
    assert done.trace is None and not list(tmp_path.iterdir())


def test_a_program_that_ends_among_its_kept_steps_keeps_those(tmp_path: Path) -> None:
    done = record(RecordingPlan(wait=0, warmup=0, active=9, detail=LEAN), tmp_path, five, steps=4)
    assert done.steps_kept == 4 and names(done)["aten::exp"] == 20
    # What runs after the last of them is no step.
    assert sum(name.startswith("ProfilerStep") for name in names(done)) == 4


def test_fewer_steps_where_all_would_exceed_the_bound(tmp_path: Path) -> None:
    whole = record(RecordingPlan(wait=1, active=3, detail=LEAN), tmp_path, five, steps=20)
    # A step may have an event more.
    bound = 3 * (whole.step_events + 1)
    done = record(RecordingPlan(wait=1, active=50, events=bound, detail=LEAN), tmp_path, five, steps=70)
    assert done.steps_kept == 3 and not done.cut and done.events <= 3.5 * whole.step_events


def test_a_step_beyond_the_bound_is_cut_short(tmp_path: Path) -> None:
    x = torch.ones(2)

    def many() -> None:
        for _ in range(60_000):
            x.exp()

    done = record(RecordingPlan(wait=1, active=2, events=6000, detail=LEAN), tmp_path, many, steps=6)
    assert done.cut and done.steps_kept == 0 and done.recorded_us is None
    assert done.step_events > 6000 and 0 < done.events < 60_000


def test_whole_programs_are_bounded_too(tmp_path: Path) -> None:
    x, calls = torch.ones(2), 0
    recorder = Recorder(RecordingPlan(whole=True, events=20_000, detail=LEAN), tmp_path)
    recorder.start()
    while not recorder.recording.cut:
        x.exp()
        calls += 1
    for _ in range(1_000):
        x.exp()
    done = recorder.stop()
    assert done.trace is not None and done.seconds_kept < done.seconds
    assert done.events > 10_000 and names(done)["aten::exp"] <= calls


def test_optimizer_steps_end_steps_until_someone_says_otherwise(tmp_path: Path) -> None:
    plan = RecordingPlan(wait=1, warmup=1, active=2, detail=LEAN)
    found = names(record(plan, tmp_path, training(), steps=9, by_optimizer=True))
    assert found["ProfilerStep#3"] == found["ProfilerStep#4"] == 1
    by_call = record(plan, tmp_path, training(by=3), steps=9)
    assert by_call.steps_seen == 9 and names(by_call)["phase optimizer"] == 6


def test_a_step_that_the_optimizer_ended_is_not_counted_twice(tmp_path: Path) -> None:
    """A loop that calls `step` after each step of the optimizer, and one with two optimizer steps before."""
    for by, wanted in ((1, [0, 1, 2, 3]), (2, [2, 3, 4, 5])):
        step = training(by)
        recorder = Recorder(RecordingPlan(0, 0, active=4, detail=LEAN), tmp_path, by_optimizer=True)
        recorder.start()
        for _ in range(7):
            step()
            recorder.step()
        done = recorder.stop()
        steps = [name for name in names(done) if name.startswith("ProfilerStep#")]
        assert done.steps_kept == 4 and sorted(steps) == [f"ProfilerStep#{number}" for number in wanted]


def test_a_recorder_that_fails_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object) -> None:
        raise ValueError("no such trace\nof mine")

    plan = RecordingPlan(0, 0, active=1, detail=LEAN)
    monkeypatch.setattr(windows, "count_events", fails)
    counted = record(plan, tmp_path, five, steps=3)
    assert counted.failed == "ValueError: no such trace" and names(counted)["ProfilerStep#0"] == 1
    monkeypatch.undo()
    monkeypatch.setattr(HostRanges, "join", fails)
    joined = record(plan, tmp_path, five, steps=3)
    assert not joined.failed and names(joined)["aten::exp"] == 5
    monkeypatch.setattr(torch.profiler.profile, "export_chrome_trace", fails)
    (tmp_path / "trace.json").unlink()
    assert record(plan, tmp_path, five, steps=3).trace is None
    said = capfd.readouterr().err
    assert "the recorder failed; please report ValueError: no such trace" in said and "are not in the trace" in said


def test_a_forked_child_is_not_recorded(tmp_path: Path) -> None:
    recorder = Recorder(RecordingPlan(0, 0, active=3), tmp_path)
    recorder.start()
    step = training()
    step()
    child = os.fork()
    if not child:
        try:
            # No backward: builds for CUDA start threads for it, which PyTorch does not let a child use.
            nn.Linear(4, 4)(torch.randn(2, 4))
            recorder.step()
            hooks = len(module._global_forward_hooks)
            os._exit(hooks or recorder.stop().steps_kept or sys.getprofile() is not None)
        finally:
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    recorder.step()
    done = recorder.stop()
    assert done.steps_kept == 1 and names(done)["phase forward"] == 1


def test_collections_of_garbage_have_ranges(tmp_path: Path) -> None:
    step = training()

    def collecting() -> None:
        step()
        gc.collect()

    found = names(record(RecordingPlan(wait=0, warmup=0, active=2, detail=LEAN), tmp_path, collecting, steps=2))
    assert found["garbage collection"] >= 2


@pytest.mark.parametrize("detail", [LEAN, Detail()], ids=["by hooks", "by the profiler's own events"])
def test_phases_and_layers_have_ranges(tmp_path: Path, detail: Detail) -> None:
    found = names(record(RecordingPlan(wait=0, warmup=0, active=2, detail=detail), tmp_path, training(), steps=2))
    ours = {name: count for name, count in found.items() if name.startswith(("phase", "layer"))}
    assert ours == {
        "phase forward": 2, "layer 0": 2, "layer 1": 2, "layer 2": 2, "phase backward": 2, "phase optimizer": 2
    }  # fmt: skip
    quiet = record(
        RecordingPlan(wait=0, warmup=0, active=2, detail=detail, layers=False), tmp_path, training(), steps=2
    )
    assert not [name for name in names(quiet) if name.startswith("layer")]


@pytest.mark.parametrize("detail", [LEAN, Detail()], ids=["by hooks", "by the profiler's own events"])
def test_ranges_close_when_a_layer_raises(tmp_path: Path, detail: Detail) -> None:
    class Fails(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError(x)

    model = nn.Sequential(nn.Identity(), nn.Sequential(Fails()))
    healthy = nn.Sequential(nn.Identity())

    def step() -> None:
        with pytest.raises(KeyError):
            model(torch.ones(1))
        healthy(torch.ones(1))

    found = names(record(RecordingPlan(wait=0, warmup=0, active=1, detail=detail), tmp_path, step, steps=1))
    # The second model is a model again, not a layer of the first.
    assert found["phase forward"] == 2 and found["layer 1.0"] == 1


def test_with_stacks_modules_run_without_hooks(tmp_path: Path) -> None:
    """Each layer's range is where its forward ran, by a clock of the test's; hooks would cost each call three more."""
    ran: list[tuple[int, int]] = []

    class Timed(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            began, hooks = time.time_ns(), len(module._global_forward_hooks) + len(module._global_forward_pre_hooks)
            assert hooks == 0
            x = x + 1
            ran.append((began, time.time_ns()))
            return x

    model = nn.Sequential(Timed(), nn.Sequential(Timed()))
    done = record(RecordingPlan(wait=0, warmup=0, active=2), tmp_path, lambda: model(torch.ones(1)), steps=2)
    trace = json.loads((done.trace or tmp_path).read_text())
    found = sorted(
        (trace["baseTimeNanoseconds"] + round(event["ts"] * 1000), round(event["dur"] * 1000))
        for event in trace["traceEvents"]
        if event["name"] in ("layer 0", "layer 1.0")
    )
    assert len(found) == len(ran) == 4
    for (begin, dur), (began, ended) in zip(found, ran, strict=True):
        assert begin - 1000 <= began < ended <= begin + dur + 1000


def test_compiled_models_compile_as_they_do_without(tmp_path: Path) -> None:
    graphs: list[int] = []

    def count(graph: Any, _: Any) -> Any:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compiled = torch.compile(model, backend=count)
    compiled(torch.ones(2, 4))
    done = record(RecordingPlan(wait=1, active=1, detail=LEAN), tmp_path, lambda: compiled(torch.ones(2, 4)), steps=8)
    torch._dynamo.reset()
    fresh = torch.compile(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), backend=count)
    record(RecordingPlan(wait=1, active=1, detail=LEAN), tmp_path, lambda: fresh(torch.ones(2, 4)), steps=8)
    assert len(graphs) == 2 and graphs[0] == graphs[1]
    assert names(done)["phase forward"] == 1


def test_leaves_the_process_as_it_was(tmp_path: Path) -> None:
    def state() -> tuple[object, ...]:
        span = torch.profiler.record_function
        hooks = (module._global_forward_hooks, module._global_forward_pre_hooks)
        return (
            torch.autograd.backward, torch.autograd.grad, span.__enter__, span.__exit__, *map(len, hooks),
            signal.getsignal(signal.SIGRTMAX), len(gc.callbacks),
        )  # fmt: skip

    before = state()
    record(RecordingPlan(wait=0, warmup=1, active=1), tmp_path, training(), steps=5)
    assert state() == before


def test_nvtx_without_a_gpu_is_refused(tmp_path: Path) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UsageError, match="Nsight"):
        Recorder(RecordingPlan(nvtx=True), tmp_path).start()


SPANNING = """
import sys, torch
from pathlib import Path
from torch.profiler import record_function
from tilewright.measure.recording.host_ranges import HostRanges
from tilewright.measure.recording.plan import RecordingPlan
from tilewright.measure.recording.recorder import Recorder

for repeat in range(4):
    recorder = Recorder(RecordingPlan(wait=1, warmup=1, active=2), Path(sys.argv[1]))
    recorder.start()
    spans = []
    for step in range(8):
        # Each span outlives the window in which it began, and the next one too.
        spans.append(record_function(f"span {step}"))
        spans[-1].__enter__()
        for _ in range(200):
            torch.ones(3).exp()
        recorder.step()
        if step >= 3:
            spans[step - 3].__exit__(None, None, None)
    assert recorder.stop().steps_kept == 2
print("alive")
"""


def test_ranges_over_several_windows_do_no_damage(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", SPANNING, str(tmp_path)], capture_output=True, text=True, timeout=HANG_S, check=False
    )
    assert (ran.returncode, ran.stdout.strip()[-5:]) == (0, "alive"), ran.stderr
