"""The lines that were followed, against those that the source has."""

import inspect
import json
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import typer

from tilewright.measure.recording import line_tracer
from tilewright.measure.recording.line_tracer import LineTracer, is_user_file


def stopped(given: LineTracer) -> Any:
    """Ends it; what it tells if an event began at each of its times."""
    given.stop()
    text = given.told(given._at)
    assert text is not None
    return json.loads(text)


def followed(run: Callable[[], object]) -> list[tuple[str, str]]:
    """The functions and the text of the lines of this file that were reached while `run` ran."""
    given = LineTracer()
    given.start()
    run()
    told = stopped(given)
    source = Path(__file__).read_text().splitlines()
    places = [told["places"][which] for which in told["which"] if which >= 0]
    assert told["thread"] == threading.get_native_id() and all(since >= 0 for since in told["since"][1:])
    return [(function, source[line - 1].strip()) for file, function, line, *_ in places if file == __file__]


def inner(x: int) -> int:
    y = x + 1
    return y


def outer() -> int:
    a = 1
    b = inner(a) + inner(a)
    return b


def test_lines_that_enter_a_block() -> None:
    lock = threading.Lock()

    def entering() -> int:
        number = 1
        with lock:
            number += 1
        with lock:
            number += 1
        return number

    begun = entering.__code__.co_firstlineno
    assert line_tracer.enters_blocks(entering.__code__) == {begun + 2, begun + 4}


def test_every_line_and_the_way_back() -> None:
    ways = [line for line in followed(outer) if line[0] in ("outer", "inner")]
    call = ("inner", "y = x + 1"), ("inner", "return y"), ("outer", "b = inner(a) + inner(a)")
    assert ways == [("outer", "a = 1"), ("outer", "b = inner(a) + inner(a)"), *call, *call, ("outer", "return b")]


def test_without_a_compiler_the_lines_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = followed(outer)
    monkeypatch.setattr(line_tracer, "library", lambda: None)
    assert followed(outer) == compiled


def test_the_function_that_runs_already_is_followed_too() -> None:
    given = LineTracer()
    given.start()
    first = torch.ones(1)
    second = first + 1
    given.stop()
    del second
    this = inspect.currentframe()
    assert this is not None and this.f_trace is None
    source = Path(__file__).read_text().splitlines()
    places = stopped(given)["places"]
    texts = [source[line - 1].strip() for _, function, line in places if function == this.f_code.co_name]
    assert texts == ["given.start()", "first = torch.ones(1)", "second = first + 1", "given.stop()"]


def test_a_line_goes_on_after_an_exception_and_a_generator() -> None:
    def raises() -> None:
        raise ValueError

    def counts() -> Any:
        yield 1
        yield 2

    def step() -> int:
        try:
            raises()
        except ValueError:
            total = 0
        return total + sum(counts())

    ways = [text for function, text in followed(step) if function == "step"]
    assert ways[-1] == "return total + sum(counts())" and "total = 0" in ways


def test_another_thread_may_stop_it() -> None:
    given = LineTracer()
    given.start()
    stopping = threading.Thread(target=given.stop)
    stopping.start()
    stopping.join()
    reached = len(given._which)
    outer()
    assert sys.gettrace() is None and len(given._which) == reached


def test_a_debugger_is_left_alone() -> None:
    def debugger(frame: FrameType, event: str, argument: object) -> None:
        return None

    before = sys.gettrace()
    sys.settrace(debugger)
    try:
        given = LineTracer()
        given.start()
        given.stop()
        assert sys.gettrace() is debugger and given.told([time.time_ns()]) is None
    finally:
        sys.settrace(before)


def test_there_is_a_bound_and_what_lies_beyond_is_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_tracer, "MOST_LINES", 10)
    given = LineTracer()
    given.start()
    for _ in range(100):
        outer()
    assert given.ended_early
    told = stopped(given)
    assert len(told["which"]) == len(told["since"]) == 11 and told["which"][-1] == -1
    assert sys.gettrace() is None


def test_only_what_events_need_is_told_and_the_line_at_regular_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line at which nothing began is not told, but that of each time on the grid: here the first alone."""
    monkeypatch.setattr("tilewright.measure.recording.line_tracer._GRID_NS", 1 << 60)
    given = LineTracer()
    given.start()
    outer()
    given.stop()
    longest = max(range(len(given._at) - 1), key=lambda number: given._at[number + 1] - given._at[number])
    told = json.loads(given.told([given._at[longest]]) or "")
    needed = sorted({0, longest})
    lines = [given._which[number] % (1 << line_tracer._LINE_BITS) for number in needed]
    assert [told["places"][which][2] for which in told["which"]] == lines
    assert sum(told["since"]) == given._at[longest]
    monkeypatch.setattr("tilewright.measure.recording.line_tracer._GRID_NS", 1)
    monkeypatch.setattr("tilewright.measure.recording.line_tracer._MOST_OF_GRID", 1 << 40)
    assert len(json.loads(given.told([]) or "")["which"]) >= len(given._at) - 2


def test_times_are_of_the_wall_clock() -> None:
    before = time.time_ns()
    given = LineTracer()
    given.start()
    assert before <= stopped(given)["since"][0] <= time.time_ns()


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is Python's since 3.12")
def test_lines_of_other_code_are_no_events_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_tracer, "library", lambda: None)
    given = LineTracer()
    given.start()
    textwrap.wrap("the quick brown fox", 9)
    (tool,) = [tool for tool in range(6) if sys.monitoring.get_tool(tool) == line_tracer.LINES]
    events = sys.monitoring.get_events(tool) | sys.monitoring.get_local_events(tool, textwrap.wrap.__code__)
    given.stop()
    assert not events & sys.monitoring.events.LINE


@pytest.mark.skipif(sys.version_info < (3, 12), reason="sys.monitoring is Python's since 3.12")
@pytest.mark.parametrize("has_compiler", [False, True])
def test_nothing_of_it_is_left_behind(has_compiler: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not has_compiler:
        monkeypatch.setattr(line_tracer, "library", lambda: None)
    followed(outer)
    events = [
        sys.monitoring.get_local_events(tool, inner.__code__) for tool in range(6) if sys.monitoring.get_tool(tool)
    ]
    assert not any(events) and line_tracer.LINES not in map(sys.monitoring.get_tool, range(6))
    assert ("inner", "return y") in followed(outer)


def test_whose_a_file_is() -> None:
    generated = "c3k4yl3tujcixxvd5uikqyklalomijtcbn4pgb76bqpbl65ulw7v.py"
    assert is_user_file(Path(__file__)) and is_user_file(Path(pytest.__file__))
    others = (
        torch.__file__,
        line_tracer.__file__,
        json.__file__,
        typer.__file__,
        "<string>",
        generated,
        "/venv/bin/tilewright",
    )
    assert not any(map(is_user_file, map(Path, others)))
