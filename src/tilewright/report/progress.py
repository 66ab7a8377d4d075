"""One line in a terminal or a notebook while something takes long: the stage, what is counted, the seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from tilewright.records.notebook import display, in_kernel
from tilewright.records.progress import is_watched, watched

PATIENCE_S = 2.0
"""Nothing is said of what takes less."""


class ProgressLine:
    """`planning, 1,300 of 5,000 operators fused, 14 s`; the seconds from two on."""

    def __init__(self, stage: str) -> None:
        self.enter(stage)

    def enter(self, stage: str) -> None:
        self._stage = stage
        self._counted = ""
        self._began = time.monotonic()

    def count(self, what: str, done: int, of: int | None) -> None:
        number = f"{done:,}" if of is None else f"{done:,} of {of:,}"
        self._counted = f"{number} {what}"

    def __str__(self) -> str:
        seconds = time.monotonic() - self._began
        parts = [self._stage, self._counted, f"{seconds:.0f} s" if seconds >= PATIENCE_S else ""]
        return ", ".join(part for part in parts if part)

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(str(self))


@contextmanager
def progress_of(what: str) -> Iterator[Callable[[str], None]]:
    """Show in a terminal's stderr or below a notebook's cell, from two seconds on, how far `what` is.

    The value sets the stage. Nothing is shown elsewhere, or inside a command that shows progress itself.
    """
    if is_watched() or not (in_kernel() or sys.stderr.isatty()):
        yield lambda _: None
        return
    line = ProgressLine(what)
    shown = _LateStatus(_Cell(line) if in_kernel() else _terminal(line))
    try:
        with watched(line.count):
            yield lambda stage: line.enter(f"{what}: {stage}")
    finally:
        shown.end()


class _Status(Protocol):
    def start(self) -> None: ...

    def stop(self) -> None: ...


def _terminal(line: ProgressLine) -> _Status:
    from rich.console import Console

    return Console(stderr=True).status(line)


class _Cell:
    """A line below a notebook's cell, which goes when it ends."""

    def __init__(self, line: ProgressLine) -> None:
        self._line = line
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._follow, daemon=True)

    def start(self) -> None:
        self._shown = display({"text/plain": str(self._line)})
        self._thread.start()

    def _follow(self) -> None:
        while not self._ended.wait(1.0):
            self._shown({"text/plain": str(self._line)})

    def stop(self) -> None:
        self._ended.set()
        self._thread.join()
        self._shown({"text/plain": ""})


class _LateStatus:
    """A status that appears if it has not ended by then."""

    def __init__(self, status: _Status) -> None:
        self._lock = threading.Lock()
        self._has_ended = self._has_begun = False
        self._status = status
        self._timer = threading.Timer(PATIENCE_S, self._begin)
        self._timer.daemon = True
        self._timer.start()

    def _begin(self) -> None:
        with self._lock:
            if not self._has_ended:
                self._status.start()
                self._has_begun = True

    def end(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._has_ended = True
            if self._has_begun:
                self._status.stop()
