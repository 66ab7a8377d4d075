"""The terminal's view of a timeline: what it says, and that nothing of a trace gets at the terminal."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.report.printing import printed
from tests.trace.kineto import Trace
from tests.trace.test_ranks import rank
from tilewright.records.errors import StoreError
from tilewright.report.accounting import show_accounting
from tilewright.store import Run
from tilewright.trace import trace_run


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
        "is known: bytes 100.0 %",
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
    assert "of the operators' own time is known: bytes 100.0 %" in shown(trace)


def test_a_run_without_a_timeline(tmp_path: Path) -> None:
    with Run.create(tmp_path / "plain.duckdb", command="x", target="x", case="x") as made:
        pass
    assert "nothing in this trace" in printed(show_accounting(made.path))
    with pytest.raises(StoreError, match="no run"):
        show_accounting(tmp_path / "missing.duckdb")
