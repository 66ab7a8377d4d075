"""Runs compared: which operator explains that a step became slower, and the words for it."""

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.report.printing import printed
from tests.trace.kineto import Trace
from tilewright.records.errors import StoreError
from tilewright.report.diff import show_diff
from tilewright.store import Run
from tilewright.trace import trace_run
from tilewright.trace.compare.change import MANY_RUNS
from tilewright.trace.compare.diff import RunSteps, Where, diff, in_turns, read_run, runs_of
from tilewright.trace.compare.side import read_side

pytestmark = pytest.mark.usefixtures("home")
STEPS = 30
STEP_US = "SELECT dur / 1e3 FROM step ORDER BY ts"


def run(trace: Trace, folder: Path) -> Path:
    return trace_run([trace.write(folder)], command="test", tell=lambda _: None)[0]


def noisy(seed: int, gelu: int = 30_000) -> Trace:
    """30 steps of 100 ms, in each a product of 40 ms and a GELU of 30 or a little more, all with 1 % of noise."""
    draw = Random(seed)
    trace = Trace()
    at = 0
    for number in range(STEPS):
        lengths = [round(us * draw.gauss(1, 0.01)) for us in (40_000, gelu)]
        end = at + round((70_000 + gelu) * draw.gauss(1, 0.005))
        trace.step(number, at, end)
        start = at + 100
        for begin, operator, length in zip((at + 10, at + 50), ("aten::mm", "aten::gelu"), lengths, strict=True):
            trace.operator(operator, begin, begin + 30)
            trace.launch(begin + 5, start, start + length)
            start += length
        at = end
    return trace


def test_a_slower_operator_is_found_and_named(tmp_path: Path) -> None:
    before, after = run(noisy(1), tmp_path), run(noisy(2, gelu=36_000), tmp_path)
    found = diff([read_run(before)], [read_run(after)])
    assert found.step.verdict == "slower" and found.step.ratio == pytest.approx(1.06, abs=0.01)
    assert found.device is not None and found.device.verdict == "slower"
    assert found.device.ratio == pytest.approx(76 / 70, abs=0.01)
    first = found.operators[0]
    assert (first.where, first.operator) == ("device", "aten::gelu")
    assert first.difference_us == pytest.approx(6000, rel=0.1)
    assert found.of_device(first) == pytest.approx(1, abs=0.15)
    text = printed(show_diff(found))
    assert "slower" in text and "aten::gelu" in text and "+6." in text


def test_the_same_program_twice(tmp_path: Path) -> None:
    found = diff([read_run(run(noisy(3), tmp_path))], [read_run(run(noisy(4), tmp_path))])
    assert found.step.verdict == "the same"
    assert found.device is not None and found.device.verdict in ("the same", "cannot tell")
    assert found.of_device(found.operators[0]) is None or abs(found.operators[0].difference_us) < 1000


def test_operators_of_the_host_count_without_what_they_call(trace: Trace, tmp_path: Path) -> None:
    trace.step(0, 0, 100)
    trace.operator("aten::linear", 0, 50)
    trace.operator("aten::addmm", 10, 40)
    trace.launch(20, 60, 90)
    assert read_run(run(trace, tmp_path)).operators == {
        ("host", "aten::linear"): (20, 1),
        ("host", "aten::addmm"): (29, 1),
        ("host", "cudaLaunchKernel"): (1, 1),
        ("device", "aten::addmm"): (30, 1),
    }


def test_calls_outside_of_the_steps_are_none_of_a_step(trace: Trace, tmp_path: Path) -> None:
    """As where the recorder dropped its first steps."""
    for at in (0, 100, 200, 300):
        trace.operator("aten::mm", at + 1, at + 51)
        if at >= 200:
            trace.step(at, at, at + 100)
    assert read_run(run(trace, tmp_path)).operators == {("host", "aten::mm"): (50, 1)}


def test_folders_of_runs_made_in_turns(tmp_path: Path) -> None:
    """Runs that were recorded one after the other: one a side is loaded, the others are that one, a little slower."""
    sides = []
    for side, name in enumerate(("before", "after")):
        folder = tmp_path / name
        folder.mkdir()
        made = run(noisy(side, gelu=30_000 + 6_000 * side), tmp_path)
        made.rename(folder / made.name)
        (one,) = map(read_run, runs_of(folder))
        numbers = range(MANY_RUNS)
        slower = [tuple(us * (1 + number / 1000) for us in one.steps) for number in numbers]
        sides.append([replace(one, created_us=2 * number + side, steps=slower[number]) for number in numbers])
    found = diff(*sides)
    assert found.step.verdict == "slower" and f"{MANY_RUNS} pairs of interleaved runs" in found.step.method
    noisy_sides = [
        [replace(each, steps=tuple(us * (1 + number % 3) for us in each.steps)) for number, each in enumerate(side)]
        for side in (sides[0], sides[1][::-1])
    ]
    found = diff(*noisy_sides)
    assert found.step.verdict == "cannot tell" and f"{2 * MANY_RUNS} traces per side" in found.decide


def test_a_run_that_saw_no_device(tmp_path: Path) -> None:
    runs = []
    for number in range(2):
        trace = Trace()
        trace.step(0, 0, 100)
        trace.operator("aten::mm", 0, 80 + number)
        runs.append([read_run(run(trace, tmp_path))])
    found = diff(*runs)
    assert found.device is None and found.step.verdict == "cannot tell"
    assert "cannot tell" in printed(show_diff(found), width=80)


def test_a_run_without_a_timeline_or_a_step_and_a_folder_without_runs_are_refused(tmp_path: Path) -> None:
    with Run.create(tmp_path / "plain.duckdb", command="x", target="x", case="x") as made:
        pass
    with pytest.raises(StoreError, match="no timeline"):
        read_run(made.path)
    empty = read_run(run(Trace(), tmp_path))
    with pytest.raises(StoreError, match="no step was recorded"):
        diff([empty], [empty])
    (tmp_path / "none").mkdir()
    with pytest.raises(StoreError, match="no run"):
        runs_of(tmp_path / "none")


def test_traces_that_are_no_runs(tmp_path: Path) -> None:
    sides = [noisy(1).write(tmp_path, "before"), noisy(2, gelu=36_000).write(tmp_path, "after")]
    found = diff(*map(read_side, sides))
    assert found.step.verdict == "slower" and found.operators[0].operator == "aten::gelu"
    assert (found.before, found.after) == ((sides[0],), (sides[1],))


def test_folders_of_traces(tmp_path: Path) -> None:
    noisy(1).write(tmp_path, "first")
    (read,) = read_side(tmp_path)
    assert read.path.name == "first.json" and ("device", "aten::gelu") in read.operators


@pytest.mark.parametrize(
    ("names", "category", "steps"),
    [
        (["step 0", "step 1", "step 2"], "user_annotation", (100, 120, 80)),
        (["train_step"] * 3, "nvtx", (100, 120, 80)),
        (["Iteration: 7", "Iteration: 8", "Iteration: 9"], "user_annotation", (100, 120, 80)),
        (["epoch 1"] * 3, "user_annotation", (285,)),
        (["Optimizer.step#SGD.step"] * 3, "user_annotation", (285,)),
        (["step", "other", "other"], "user_annotation", (285,)),
    ],
    ids=["steps", "one name", "iterations", "epochs", "an optimizer", "only one"],
)
def test_steps_that_the_user_named(trace: Trace, names: list[str], category: str, steps: tuple[float, ...]) -> None:
    """A step lasts until the next one begins, and the last as long as its range; else all is one step."""
    for at, name in zip((0, 100, 220), names, strict=True):
        trace.slice(category, name, at, at + 80)
        trace.operator("aten::mm", at + 5, at + 70)
    assert [us for (us,) in trace.rows(STEP_US)] == list(steps)


def test_the_longer_of_two_families_of_steps(trace: Trace) -> None:
    for at in (0, 100):
        trace.slice("user_annotation", "step", at, at + 80)
        trace.slice("user_annotation", f"batch {at}", at + 10, at + 30)
        trace.slice("user_annotation", "step", at + 5, at + 90, thread=200)
    assert trace.rows(STEP_US) == [(100,), (85,)]


def test_turns() -> None:
    assert in_turns([1, 4, 5], [2, 3, 6])
    assert not in_turns([1, 2], [3])
    assert not in_turns([1, 2, 9], [3, 4, 10])


def test_an_operator_that_only_one_side_has() -> None:
    def made(operators: dict[str, float]) -> RunSteps:
        table: dict[tuple[Where, str], tuple[float, float]] = {
            ("device", name): (us, 1.0) for name, us in operators.items()
        }
        return RunSteps(Path("x"), 0, (100.0, 100.0), (sum(operators.values()),) * 2, table)

    found = diff([made({"aten::mm": 50.0})], [made({"aten::bmm": 40.0})])
    assert [(op.operator, op.before_us, op.after_us, op.before_calls, op.after_calls) for op in found.operators] == [
        ("aten::mm", 50, 0, 1, 0),
        ("aten::bmm", 0, 40, 0, 1),
    ]


def test_a_single_run_that_other_programs_disturbed_decides_nothing() -> None:
    """The second of two runs of one program took twice as long beside others."""
    draw = Random(6)

    def made(step_us: float, queued: float, at: int = 0) -> RunSteps:
        steps = tuple(step_us * draw.gauss(1, 0.01) for _ in range(40))
        return RunSteps(Path("x"), at, steps, (), {}, bare=True, queued=queued)

    assert diff([made(100_000, 0.01)], [made(200_000, 0.02)]).step.verdict == "slower"
    found = diff([made(100_000, 0.01)], [made(200_000, 0.34)])
    assert found.step.verdict == "cannot tell"
    assert "other programs used the processors, and one of the runs had none for 34% of its steps" in found.step.method
    sides = [[made(us, 0.34, 2 * turn + side) for turn in range(MANY_RUNS)] for side, us in enumerate((100, 130))]
    assert diff(*sides).step.verdict == "slower"


def test_steps_timed_without_the_profiler_decide_and_other_calls_are_said() -> None:
    draw = Random(5)

    def made(step_us: float, calls: float, count: int = 30) -> RunSteps:
        def noise(us: float) -> tuple[float, ...]:
            return tuple(us * draw.gauss(1, 0.01) for _ in range(count))

        table: dict[tuple[Where, str], tuple[float, float]] = {
            ("device", "aten::mm"): (70_000 * step_us / 100_000, 1.0),
            ("host", "aten::copy_"): (1.0, calls),
        }
        command = "tilewright profile -- python train.py"
        each: dict[tuple[Where, str], tuple[float, ...]] = {("device", "aten::mm"): noise(0.7 * step_us)}
        return RunSteps(Path("x"), 0, noise(step_us), (), table, each, traced=3, command=command, bare=True)

    found = diff([made(100_000, 3)], [made(106_000, 5)])
    assert found.step.verdict == "slower" and found.decide == ""
    by_name = {op.operator: op for op in found.operators}
    slower, called = by_name["aten::mm"].change, by_name["aten::copy_"]
    assert slower is not None and slower.verdict == "slower" and called.change is None
    text = printed(show_diff(found))
    assert "other calls" in text and "1 operator is called more or less often" in text

    short = diff([made(100_000, 3, 6)], [made(106_000, 3, 6)])
    assert short.step.verdict == "cannot tell"
    assert "repeat `tilewright profile -- python train.py`" in short.decide
