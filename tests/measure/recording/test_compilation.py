"""A program that compiles while it is recorded: the same numbers and as many graphs as without a recorder."""

import contextlib
import inspect
import json
import logging
import os
import runpy
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.modules import module
from torch.profiler import ProfilerActivity, profile, record_function

from tests.waiting import in_threads
from tilewright.measure.recording.compilation import COMPILING, Replacements
from tilewright.measure.recording.host_ranges import HostRanges
from tilewright.measure.recording.plan import Detail, RecordingPlan
from tilewright.measure.recording.ranges import Marker
from tilewright.measure.recording.recorder import Recorder
from tilewright.measure.recording.synchronisations import MARK, marked_synchronisations
from tilewright.pytorch.compiler import recompile_reasons

LEAN = Detail(shapes=False, stacks=False, memory=False)
Step = Callable[[int], float]


def compiled(function: Any) -> Any:
    return torch.compile(function, backend="eager")


class Breaks(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self[0](x)
        torch._dynamo.graph_break()
        result: torch.Tensor = self[1](x)
        return result


def training(what: str) -> Step:
    """One step on a batch of that size; gives the loss."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 2))
    model = (Breaks if what == "graph break" else nn.Sequential)(*layers)
    rule = torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9)
    forward: Any = model if what in ("optimizer", "nested module") else compiled(model)
    update = compiled(rule.step) if what == "optimizer" else rule.step
    if what == "function":
        forward = compiled(lambda x: model(x).square())
    elif what == "nested module":
        model[1] = compiled(model[1])

    def step(batch: int) -> float:
        loss = forward(torch.linspace(-1, 1, 4 * batch).view(batch, 4)).square().sum()
        loss.backward()
        update()
        rule.zero_grad()
        return float(loss.detach())

    return step


@pytest.mark.parametrize(
    ("what", "detail"),
    [
        ("module", Detail()),
        ("function", Detail()),
        ("nested module", LEAN),
        ("graph break", LEAN),
        ("optimizer", LEAN),
    ],
)
def test_a_program_compiles_as_it_does_without(tmp_path: Path, what: str, detail: Detail) -> None:
    """New shapes come before, while and after the steps are recorded."""
    seen: list[tuple[list[float], int]] = []
    for records in (False, True):
        torch._dynamo.reset()
        counters.clear()
        step, recorder = training(what), Recorder(RecordingPlan(0, 0, active=9, detail=detail), tmp_path)
        losses = [step(2)]
        if records:
            recorder.start()
        for batch in (2, 3, 4):
            losses.append(step(batch))
            if records:
                recorder.step()
        done = recorder.stop() if records else None
        losses += [step(2), step(5)]
        seen.append((losses, counters["stats"]["unique_graphs"]))
    assert seen[0] == seen[1] and seen[0][1] > 0
    assert done is not None and done.trace is not None and done.steps_kept == 3
    # Without the compiler's own calls: a hundred times as many.
    assert done.events < 40_000
    ranges = [event for event in json.loads(done.trace.read_text())["traceEvents"] if event.get("name") == COMPILING]
    # The optimizer compiles again as its buffers are there.
    assert done.compiled_in == ([0] if what == "optimizer" else [1]) and ranges
    # The pauses hold what the tracer takes to stop and to start again, too.
    assert 0 < sum(event["dur"] for event in ranges) / 1e6 <= done.compiling_seconds + 1e-3


def test_hooks_are_hidden_from_the_compiler_in_all_threads() -> None:
    hooks, seen = module._global_forward_hooks, []
    before = len(hooks)

    def look() -> None:
        seen.append(len(hooks) - before)

    def backend(graph: Any, _: Any) -> Any:
        look()
        other = threading.Thread(target=look)
        other.start()
        other.join()
        return graph.forward

    @torch.compile(backend=backend)
    def region(x: torch.Tensor) -> torch.Tensor:
        torch.compiler.disable(look)()
        return x + 1

    with Replacements() as replacements, replacements.entry(hooks, object(), lambda *_: None):
        look()
        region(torch.ones(2))
        look()
    # What the region calls uncompiled has them.
    assert seen == [1, 1, 0, 0, 1] and len(hooks) == before


def joined(ranges: HostRanges, folder: Path, text: str) -> list[dict[str, Any]]:
    (folder / "bare.json").write_text(text)
    ranges.join(folder / "bare.json", folder / "joined.json")
    document = json.loads((folder / "joined.json").read_text())
    assert {key: value for key, value in document.items() if key != "traceEvents"} == {
        key: value for key, value in json.loads(text).items() if key != "traceEvents"
    }
    events: list[dict[str, Any]] = document["traceEvents"]
    return events


def test_one_clock_with_the_profiler(tmp_path: Path) -> None:
    ranges = HostRanges()
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        for _ in range(20):
            close = ranges.mark("outer")
            with record_function("inner"):
                torch.ones(3).exp()
            close()
    profiler.export_chrome_trace(str(tmp_path / "kineto.json"))
    events = joined(ranges, tmp_path, (tmp_path / "kineto.json").read_text())
    outer = [event for event in events if event["name"] == "outer"]
    inner = [event for event in events if event["name"] == "inner"]
    assert len(outer) == len(inner) == 20
    for around, within in zip(outer, inner, strict=True):
        assert (around["pid"], around["tid"]) == (within["pid"], within["tid"])
        # Kineto converts its clock once a recording: some microseconds may lie between the two.
        assert around["ts"] - 50 < within["ts"] and within["ts"] + within["dur"] < around["ts"] + around["dur"] + 50


@pytest.mark.parametrize("events", ["[]", "[ ]", '[{"ph": "i", "name": "mine", "ts": 1}]'])
def test_events_of_every_length(tmp_path: Path, events: str) -> None:
    ranges = HostRanges()
    text = f'{{"baseTimeNanoseconds": 1000, "traceEvents": {events}, "traceName": "x"}}'
    assert len(joined(ranges, tmp_path, text)) == len(json.loads(events))
    ranges.mark('a "name"\n</script>')()
    found = joined(ranges, tmp_path, text)
    assert len(found) == len(json.loads(events)) + 1
    assert found[0]["name"] == 'a "name"\n</script>' and found[0]["pid"] == os.getpid()


def test_a_header_of_any_length(tmp_path: Path) -> None:
    ranges = HostRanges()
    ranges.mark("range")()
    text = json.dumps({"notes": ["x" * 1000] * 3000, "baseTimeNanoseconds": 1000, "traceEvents": []})
    assert [event["name"] for event in joined(ranges, tmp_path, text)] == ["range"]


def test_every_thread_marks_its_own(tmp_path: Path) -> None:
    ranges = HostRanges()
    in_threads([lambda: [ranges.mark("range")() for _ in range(500)]] * 8)
    found = joined(ranges, tmp_path, '{"traceEvents": []}')
    assert len(found) == 4000 and all(event["dur"] >= 0 for event in found)


MESSAGE = "called a synchronizing CUDA operation (Triggered internally at CUDAFunctions.cpp:159.)"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    """A CUDA whose sync debug mode is only remembered; what it was set to, in order."""
    modes: list[object] = [0]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: None)
    yield modes


def marks(run: Callable[[], object]) -> list[str]:
    """The places that `run` was marked at."""
    names: list[str] = []
    with marked_synchronisations(into(names), Replacements()):
        run()
    return [name.removeprefix(MARK) for name in names if name.startswith(MARK)]


def into(names: list[str]) -> Marker:
    """A marker that keeps the names of its ranges."""

    def mark(name: str) -> Callable[[], None]:
        names.append(name)
        return lambda: None

    return mark


def waits() -> None:
    warnings.warn(MESSAGE, UserWarning, stacklevel=1)


def line_within(function: Callable[[], object], text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    offset = next(number for number, line in enumerate(lines) if text in line)
    return f"{Path(__file__).relative_to(Path.cwd())}:{first + offset}"


def test_the_line_and_not_that_of_the_def(cuda: list[object]) -> None:
    def step() -> None:
        value = 1
        value += 1
        torch.cuda.synchronize()

    assert marks(step) == [line_within(step, "torch.cuda.synchronize()")]


def test_an_operator_that_warns_each_time(cuda: list[object]) -> None:
    def loop() -> None:
        for _ in range(3):
            waits()

    # The warning's own frame is the test's `waits`: as innermost frame of the user's it is the place.
    assert marks(loop) == 3 * [line_within(waits, "warnings.warn")]
    assert cuda == [0, "warn", 0]


def test_a_frame_of_the_standard_library_is_not_the_users(
    cuda: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`logging` formats a tensor: the line is the one that logs."""

    class Tensor:
        def __str__(self) -> str:
            torch.cuda.synchronize()
            return "1.0"

    # Its text is made by a function that seems to be PyTorch's.
    code = Tensor.__str__.__code__.replace(co_filename=str(Path(torch.__file__).parent / "_tensor.py"))
    monkeypatch.setattr(Tensor, "__str__", type(Tensor.__str__)(code, globals()))
    logger = logging.Logger("quiet")
    with open(os.devnull, "w") as null:
        logger.addHandler(logging.StreamHandler(null))

        def log() -> None:
            logger.warning("loss %s", Tensor())

        assert marks(log) == [line_within(log, "logger.warning")]


def test_other_warnings_are_shown_as_ever(cuda: list[object]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with marked_synchronisations(into([]), Replacements()):
            warnings.warn("something else", UserWarning, stacklevel=1)
            waits()
    assert [str(warning.message) for warning in caught] == ["something else"]


def test_a_mode_that_the_user_set_stays(cuda: list[object]) -> None:
    cuda.append(2)
    assert len(marks(lambda: torch.cuda.synchronize())) == 1
    assert cuda == [0, 2]


def test_everything_is_put_back_after_an_error(cuda: list[object]) -> None:
    before = (torch.cuda.synchronize, torch.cuda.Event.synchronize, torch.cuda.Stream.synchronize, warnings.showwarning)
    with contextlib.suppress(ZeroDivisionError), marked_synchronisations(into([]), Replacements()):
        raise ZeroDivisionError
    after = (torch.cuda.synchronize, torch.cuda.Event.synchronize, torch.cuda.Stream.synchronize, warnings.showwarning)
    assert before == after and cuda[-1] == 0


def test_without_a_gpu_nothing_is_touched() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    before = torch.cuda.synchronize
    with marked_synchronisations(into([]), Replacements()):
        assert torch.cuda.synchronize is before


def test_reasons_name_files_that_share_no_folder_with_pytorch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.utils._traceback.__file__", "/elsewhere/torch/utils/_traceback.py")
    file = tmp_path / "program.py"
    file.write_text("def scaled(x, n):\n    return x * n\n")
    names = runpy.run_path(str(file))
    began = time.time()
    scaled = torch.compile(names["scaled"], backend="eager")
    for n in (1, 2):
        scaled(torch.ones(3), n)
    assert f"# {file}:2 in scaled" in recompile_reasons(began)[-1]


COMPILES_LATE = """
import sys
from pathlib import Path
import torch
from tilewright.measure.recording.plan import Detail, RecordingPlan
from tilewright.measure.recording.recorder import Recorder

layer, x = torch.nn.Linear(4, 4), torch.ones(2, 4)
lean = Detail(shapes=False, stacks=True, memory=False)
plan = RecordingPlan(wait=2, warmup=1, active=2, events=20_000, detail=lean, timed=0)
recorder = Recorder(plan, Path(sys.argv[1]), by_optimizer=True, by_calls=True)
recorder.start()
for n in range(12):
    if n == 5:
        assert recorder._keeps and not recorder.done, "within the steps to keep"
        assert "torch._dynamo" not in sys.modules
        layer.compile(backend="eager")
    with torch.no_grad():
        layer(x)
done = recorder.stop()
print(done.steps_kept, done.cut, done.failed, done.compiling_seconds > 0.2, done.trace is not None)
"""


def test_the_compiler_is_imported_by_a_program_that_compiles_and_its_import_is_not_recorded(tmp_path: Path) -> None:
    """It makes more than a million calls."""
    ran = subprocess.run([sys.executable, "-c", COMPILES_LATE, tmp_path], capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stdout.split()) == (0, ["2", "False", "True", "True"]), ran.stderr[-2000:]
