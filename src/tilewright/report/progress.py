"""One line on a terminal while something takes long: the stage, what is counted, the seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
def progress_of(what: str) -> Iterator[None]:
    """Show on a terminal's stderr, from two seconds on, how far `what` is; nothing where stderr is no terminal.

    Nothing either inside a command that shows progress itself.
    """
    if not sys.stderr.isatty() or is_watched():
        yield
        return
    shown = _LateStatus(ProgressLine(what))
    try:
        with watched(shown.line.count):
            yield
    finally:
        shown.end()


class _LateStatus:
    """A line that appears if it has not ended by then."""

    def __init__(self, line: ProgressLine) -> None:
        self.line = line
        self._lock = threading.Lock()
        self._has_ended = False
        self._status: Any = None
        self._timer = threading.Timer(PATIENCE_S, self._begin)
        self._timer.daemon = True
        self._timer.start()

    def _begin(self) -> None:
        from rich.console import Console

        with self._lock:
            if not self._has_ended:
                self._status = Console(stderr=True).status(self.line)
                self._status.start()

    def end(self) -> None:
        self._timer.cancel()
        with self._lock:
            self._has_ended = True
            if self._status is not None:
                self._status.stop()
