"""A timeline and a profile in the terminal: what they say, and that nothing of a trace gets at the terminal."""

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.report.printing import printed
from tests.trace.kineto import Trace
from tests.trace.test_ranks import rank
from tilewright.measure.recording.plan import Recording, RecordingPlan
from tilewright.records.errors import StoreError
from tilewright.report.accounting import show_accounting
from tilewright.report.profile import loss_words, recorded_words, show_profile
from tilewright.store import Run
from tilewright.store.query import reading
from tilewright.trace import trace_run
from tilewright.trace.operators.operator_table import read_operator_table


@pytest.fixture
def shown(tmp_path: Path, home: Path) -> Callable[..., str]:
    """The view of these traces."""

    def show(*traces: Trace) -> str:
        paths = [trace.write(tmp_path, f"trace{number}") for number, trace in enumerate(traces)]
        run, _ = trace_run(paths, command="test", tell=lambda _: None)
        return printed(show_accounting(run), 160)

    return show


def one_operator(name: str, dims: list[list[int]] | None) -> Trace:
    """A step with a kernel of 80 µs."""
    trace = Trace()
    trace.step(0, 0, 400)
    trace.operator(name, 1, 30, dims=dims)
    trace.launch(2, 10, 90)
    return trace


def waiting(name: str) -> Trace:
    """A step with a kernel, a wait in the function `name`, and another kernel."""
    trace = Trace()
    trace.step(0, 0, 400)
    trace.frame(f"train.py(10): {name}", 0, 390)
    trace.operator("aten::exp", 1, 30, dims=[[1 << 20]])
    trace.launch(2, 10, 90)
    trace.operator("aten::item", 40, 95)
    trace.call("cudaStreamSynchronize", 42, 92)
    trace.operator("aten::exp", 150, 180, dims=[[1 << 20]])
    trace.launch(160, 165, 400)
    return trace


@pytest.mark.parametrize(("elements", "is_below"), [(1 << 20, False), (1 << 28, True)])
def test_operators_that_beat_their_floors_question_the_ceilings(
    shown: Callable[..., str], elements: int, is_below: bool
) -> None:
    """80 µs for 8 MiB, and for 2 GiB, which take an H200 half a millisecond."""
    text = shown(one_operator("aten::exp", [[elements]]))
    assert ("took 80.0 µs, less than their floors of" in text) == is_below


@pytest.mark.parametrize("dims", [None, [[8, 8], [8, 8]]])
def test_a_trace_without_shapes_is_said_to_have_none(shown: Callable[..., str], dims: list[list[int]] | None) -> None:
    assert ("no operator has shapes" in shown(one_operator("aten::mm", dims))) == (dims is None)


def test_classes_waits_and_wins(shown: Callable[..., str]) -> None:
    text = shown(waiting("step"))
    for words in (
        "GPU 0   kernel            315 µs   78.8 %",
        "synchronisation  50.0 µs   12.5 %",
        "train.py:10 in step",
        "no synchronisation",
        "at its floor",
        "share of the device's time for which is known: the bytes 100.0 %",
    ):
        assert words in text, words


def test_names_of_a_trace_move_no_cursor(shown: Callable[..., str]) -> None:
    text = shown(waiting("\x1b[2J\x1b]0;mine\x07[bold]step"))
    assert "\x1b" not in text and "\x07" not in text and "[bold]step" in text


def test_several_ranks_stand_apart(shown: Callable[..., str]) -> None:
    text = shown(*(rank(number, [100, 300], [200, 400]) for number in range(2)))
    columns = {tuple(re.split(r"\s{2,}", line.strip())[:2]) for line in text.splitlines()}
    assert {("0", "GPU 0"), ("1", "GPU 0")} <= columns
    assert "Communication" in text and "Who kept the others waiting" in text


def test_a_host_alone(shown: Callable[..., str]) -> None:
    trace = Trace()
    trace.step(0, 0, 400)
    trace.operator("aten::exp", 1, 300, dims=[[1 << 20]])
    assert "share of the operators' own time for which is known: the bytes 100.0 %" in shown(trace)


def test_a_run_without_a_timeline(tmp_path: Path) -> None:
    with Run.create(tmp_path / "plain.duckdb", command="x", target="x", case="x") as made:
        pass
    assert "no operator, call or kernel in this trace" in printed(show_accounting(made.path))
    with pytest.raises(StoreError, match="no run"):
        show_accounting(tmp_path / "missing.duckdb")


PLAN = RecordingPlan(active=200, events=200_000)
RECORDING = Recording(
    PLAN, events=131_000, steps_seen=9, steps_kept=1, step_events=130_000, seconds_kept=0.12, seconds=1.5
)


WHOLE = RecordingPlan(whole=True)
CUT = replace(RECORDING, cut=True, steps_kept=0)


@pytest.mark.parametrize(
    ("recording", "figures"),
    [
        (RECORDING, ("1 of 200 steps: 131,000 events", "about 130,000", "limit is 200,000 (--events raises it)")),
        (
            replace(RECORDING, plan=RecordingPlan(active=1), bare_us=1000.0, recorded_us=1100.0),
            ("1 step: 131,000 events", "1.00 ms without the profiler and 1.10 ms while recorded (+10 %)"),
        ),
        (replace(RECORDING, step_events=900, steps_kept=7), ("7 steps of 200, then the program ended",)),
        (replace(CUT, step_events=5_000_000), ("first 0.12 s of one step of 200", "about 5,000,000")),
        (replace(CUT, step_events=0, plan=WHOLE), ("first 0.12 of 1.5 s", "limit of 200,000 stopped it")),
        (replace(RECORDING, step_events=0, steps_kept=0, plan=WHOLE), ("all of it: 0.12 s, 131,000 events",)),
    ],
)
def test_what_was_sampled_is_said(recording: Recording, figures: tuple[str, ...]) -> None:
    (said,) = recorded_words([recording])
    assert all(figure in said for figure in figures), said


def test_each_process_says_its_own() -> None:
    lines = recorded_words([RECORDING, RECORDING])
    assert [line.split(":")[0] for line in lines] == ["process 0", "process 1"]


@pytest.mark.usefixtures("home")
def test_shows_shares_losses_and_what_happened_once(tmp_path: Path) -> None:
    trace = Trace()
    for number, begin in ((1, 0), (2, 1000)):
        trace.step(number, begin, begin + 500)
        trace.frame("model.py(7): forward", begin, begin + 100)
        trace.operator("aten::mm\x1b[2J", begin + 10, begin + 90)
        trace.launch(begin + 20, begin + 120, begin + 150)
    trace.call("cudaDeviceSynchronize", 300, 400)
    trace.call("cudaLaunchKernel", 450, 451)
    run, _ = trace_run([trace.write(tmp_path)], command="test", tell=lambda _: None)
    with reading(run) as connection:
        table = read_operator_table(connection)
    text = printed(show_profile(run, table, [RECORDING]))
    (line,) = [line for line in text.splitlines() if line.startswith("aten::mm")]
    assert re.split(r"\s{2,}", line.strip())[2:] == [
        *("2", "158 µs", "15.8 %", "160 µs", "80.0 µs", "60.0 µs", "100.0 %", "60.0 µs", "30.0 µs", "model.py:7")
    ]
    assert loss_words(table) == ["lost: 1 launches whose work on the device is missing, of 3"]
    assert loss_words(table)[0] in text and "\x1b[2J" not in text
    assert text.index("Once, not in every step") < text.index("cudaDeviceSynchronize")
