"""The terminal's view of a timeline: what it says, and that nothing of a trace gets at the terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.report.printing import printed
from tests.trace.kineto import Trace
from tests.trace.test_ranks import rank
from tilewright.records.errors import StoreError
from tilewright.report.accounting import show_accounting
from tilewright.store import Run
from tilewright.trace import trace_run


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_HOME", str(tmp_path / "home"))


def shown(paths: list[Path]) -> str:
    run, _ = trace_run(paths, command="test", tell=lambda _: None)
    return text_of(run)


def text_of(run: Path) -> str:
    return printed(show_accounting(run), 160)


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
def test_operators_that_beat_their_floors_question_the_ceilings(tmp_path: Path, elements: int, is_below: bool) -> None:
    """80 µs for 8 MiB, and for 2 GiB, which take an H200 half a millisecond."""
    trace = Trace()
    trace.step(0, 0, 400)
    trace.operator("aten::exp", 1, 30, dims=[[elements]])
    trace.launch(2, 10, 90)
    assert ("took 80.0 µs, less than their floors of" in shown([trace.write(tmp_path)])) == is_below


@pytest.mark.parametrize("dims", [None, [[8, 8], [8, 8]]])
def test_a_trace_without_shapes_is_said_to_have_none(tmp_path: Path, dims: list[list[int]] | None) -> None:
    trace = Trace()
    trace.step(0, 0, 400)
    trace.operator("aten::mm", 1, 30, dims=dims)
    trace.launch(2, 10, 90)
    assert ("no operator has shapes" in shown([trace.write(tmp_path)])) == (dims is None)


def test_classes_waits_and_wins(tmp_path: Path) -> None:
    text = shown([waiting("step").write(tmp_path)])
    for line in (
        "GPU 0   kernel            315 µs   78.8 %",
        "synchronisation  50.0 µs   12.5 %",
        "train.py:10 in step",
    ):
        assert line in text, line
    assert "no synchronisation" in text and "at its floor" in text
    assert "is known: bytes 100.0 %" in text


def test_names_of_a_trace_move_no_cursor(tmp_path: Path) -> None:
    text = shown([waiting("\x1b[2J\x1b]0;mine\x07[bold]step").write(tmp_path)])
    assert "\x1b" not in text and "\x07" not in text and "[bold]step" in text


def test_several_ranks_stand_apart(tmp_path: Path) -> None:
    paths = [rank(number, [100, 300], [200, 400]).write(tmp_path, f"rank{number}") for number in range(2)]
    text = shown(paths)
    assert {("0", "GPU 0"), ("1", "GPU 0")} <= {
        tuple(re.split(r"\s{2,}", line.strip())[:2]) for line in text.splitlines()
    }
    assert "Communication" in text and "Who kept the others waiting" in text


def test_a_host_alone(tmp_path: Path) -> None:
    trace = Trace()
    trace.step(0, 0, 400)
    trace.operator("aten::exp", 1, 300, dims=[[1 << 20]])
    text = shown([trace.write(tmp_path)])
    assert "of the operators' own time is known: bytes 100.0 %" in text


def test_a_run_without_a_timeline(tmp_path: Path) -> None:
    with Run.create(tmp_path / "plain.duckdb", command="x", target="x", case="x") as made:
        pass
    assert "nothing in this trace" in text_of(made.path)
    with pytest.raises(StoreError, match="no run"):
        show_accounting(tmp_path / "missing.duckdb")
