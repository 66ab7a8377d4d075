"""Progress of what takes long, on a terminal alone."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tilewright import backend
from tilewright.records.progress import is_watched, tell, watched
from tilewright.report import progress
from tilewright.report.progress import ProgressLine, progress_of


def test_a_line_says_the_stage_what_is_counted_and_the_seconds() -> None:
    line = ProgressLine("planning")
    assert str(line) == "planning"
    line.count("operators tried for fusion", 1300, 5000)
    line._began -= 14
    assert str(line) == "planning, 1,300 of 5,000 operators tried for fusion, 14 s"
    line.count("calls recorded", 2000, None)
    assert str(line) == "planning, 2,000 calls recorded, 14 s"
    line.enter("compiling")
    assert str(line) == "compiling"


def test_a_terminal_shows_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    monkeypatch.setenv("TERM", "xterm")
    reads, writes = os.openpty()
    shown = b""
    with os.fdopen(writes, "w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with progress_of("compiling"):
            tell("kernels compiled", 3, 12)
            while b"3 of 12 kernels compiled" not in shown:
                shown += os.read(reads, 4096)
    os.close(reads)
    assert b"compiling" in shown and not is_watched()


def test_a_compilation_says_what_it_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []

    @contextmanager
    def noted(what: str) -> Iterator[None]:
        with watched(lambda *counted: told.append(what)):
            yield

    monkeypatch.setattr(backend, "progress_of", noted)
    with backend.recording():
        torch._dynamo.reset()
        torch.compile(lambda x: torch.sin(x) * 2 + 1, backend="tilewright")(torch.randn(7))
    assert told and all("the graph at test_progress.py" in what for what in told)


def test_a_file_gets_nothing(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PATIENCE_S", 0.0)
    with progress_of("compiling"):
        assert not is_watched()
    assert capfd.readouterr() == ("", "")
