"""Ranges by timestamps of the host, merged into a trace of PyTorch's profiler.

PyTorch's `record_function` takes several microseconds, and requires that every operator is recorded too.
Both clocks agree to a tenth of a microsecond, so that a range still holds the operators that ran in it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

_HEAD = 1 << 20
"""Kineto writes the base of its clock and the start of the events within this many bytes."""
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d+)')


class HostRanges:
    """Ranges of all threads: name, begin and end in nanoseconds since 1970, number of the thread."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, int, int, int]] = []

    def mark(self, name: str) -> Callable[[], None]:
        """Opens a range and returns the function that closes it."""
        thread, began = threading.get_native_id(), time.time_ns()
        return lambda: self._kept.append((name, began, time.time_ns(), thread))

    def join(self, trace: Path, path: Path) -> None:
        """Write Kineto's `trace` to `path` with these ranges added to its events."""
        with trace.open("rb") as given, path.open("wb") as made:
            head = given.read(_HEAD)
            events, base = _EVENTS.search(head), _BASE.search(head)
            assert events, "Kineto writes its events into the array traceEvents"
            after = head[events.end() :]
            made.write(head[: events.end()])
            made.write(b", ".join(self._events(int(base[1]) if base else 0)))
            if self._kept and not after.lstrip().startswith(b"]"):
                made.write(b",")
            made.write(after)
            shutil.copyfileobj(given, made)

    def _events(self, base: int) -> list[bytes]:
        shared = {"ph": "X", "cat": "user_annotation", "pid": os.getpid()}
        return [
            # Microseconds with three decimals: a double cannot hold nanoseconds since 1970.
            json.dumps(shared | {"name": name, "tid": thread, "args": {}})[:-1].encode()
            + f', "ts": {_us(began - base)}, "dur": {_us(ended - began)}}}'.encode()
            for name, began, ended, thread in self._kept
        ]


def _us(ns: int) -> str:
    """
    >>> _us(1_234_567), _us(-1)
    ('1234.567', '-0.001')
    """
    return f"{'-' * (ns < 0)}{abs(ns) // 1000}.{abs(ns) % 1000:03}"
