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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tilewright.measure.recording.line_tracer import LINES, LineTracer
from tilewright.records.notebook import cell_of, in_ipython

_PIECE = 1 << 20
_TIME = re.compile(rb'"ts": (\d+(?:\.\d+)?)')
_EVENTS = re.compile(rb'"traceEvents"\s*:\s*\[')
_FRAME = re.compile(rb'(?<="name": ")([^"(]+)(?=\(\d+\): )')
_BASE = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d+)')


class HostRanges:
    """Ranges of all threads: name, begin and end in nanoseconds since 1970, number of the thread."""

    def __init__(self) -> None:
        self._kept: list[tuple[str, int, int, int]] = []
        self._logs: list[tuple[int, list[int | str | None]]] = []

    def mark(self, name: str) -> Callable[[], None]:
        """Opens a range and returns the function that closes it."""
        thread, began = threading.get_native_id(), time.time_ns()
        return lambda: self._kept.append((name, began, time.time_ns(), thread))

    def log(self) -> list[int | str | None]:
        """A log (`ranges.Log`) of the calling thread's ranges; its calls are fewer than those of `mark`."""
        log: list[int | str | None] = []
        self._logs.append((threading.get_native_id(), log))
        return log

    def _take_logs(self) -> None:
        """Keep the ranges of the logs that have ended."""
        for thread, log in self._logs:
            began: list[tuple[str, int]] = []
            for at, name in zip(log[::2], log[1::2], strict=False):
                if isinstance(name, str):
                    began.append((name, int(at or 0)))
                elif began and began[-1][0]:
                    self._kept.append((*began.pop(), int(at or 0), thread))
                elif began:
                    began.pop()
        self._logs.clear()

    def add(self, ranges: Iterable[tuple[str, int, int, int]]) -> None:
        """Add ranges that have ended: name, begin, end, number of the thread."""
        self._kept += ranges

    def drop(self, prefix: str) -> None:
        """Leave out the ranges that have ended and whose names begin so."""
        self._kept = [kept for kept in self._kept if not kept[0].startswith(prefix)]

    def join(self, trace: Path, path: Path, lines: LineTracer | None = None) -> None:
        """Write Kineto's `trace` to `path` with these ranges added to its events, and `lines` to its header."""
        self._take_logs()
        with trace.open("rb") as given, path.open("wb") as made:
            head = b""
            while not (events := _EVENTS.search(head)) and (piece := given.read(_PIECE)):
                head += piece
            if not events:
                raise ValueError("Kineto's trace has no array traceEvents")
            base = int(found[1]) if (found := _BASE.search(head)) else 0
            made.write(head[: (start := head.index(b"{") + 1)])
            if lines is not None and (text := lines.told(self._begins(trace, base))):
                made.write(f"{json.dumps(LINES)}: {text},".encode())
            made.write(head[start : events.end()])
            made.write(b", ".join(self._events(base)))
            after = head[events.end() :]
            if self._kept and not after.lstrip().startswith(b"]"):
                made.write(b",")
            made.write(after)
            shutil.copyfileobj(given, made)

    def _begins(self, trace: Path, base: int) -> Iterator[int]:
        """When the events of `trace` and these ranges begin, in nanoseconds since 1970, in no order."""
        yield from (began for _, began, _, _ in self._kept)
        with trace.open("rb") as file:
            # Kineto writes a line for each few keys, and none is cut.
            for line in file:
                if found := _TIME.search(line):
                    yield base + round(float(found[1]) * 1000)

    def _events(self, base: int) -> list[bytes]:
        shared = {"ph": "X", "cat": "user_annotation", "pid": os.getpid()}
        return [
            # Microseconds with three decimals: a double cannot hold nanoseconds since 1970.
            json.dumps(shared | {"name": name, "tid": thread, "args": {}})[:-1].encode()
            + f', "ts": {_us(began - base)}, "dur": {_us(ended - began)}}}'.encode()
            for name, began, ended, thread in self._kept
        ]


def name_cells(trace: Path) -> None:
    """Rename the files that stand for cells of this process's notebook in a trace of Kineto's: `In [3](12): step`."""
    if not in_ipython():
        return

    def named(frame: re.Match[bytes]) -> bytes:
        return (cell_of(frame[1].decode("utf-8", "replace")) or "").encode() or frame[1]

    renamed = trace.with_suffix(".renamed")
    with trace.open("rb") as given, renamed.open("wb") as made:
        made.writelines(_FRAME.sub(named, line) for line in given)
    renamed.replace(trace)


def _us(ns: int) -> str:
    """
    >>> _us(1_234_567), _us(-1)
    ('1234.567', '-0.001')
    """
    return f"{'-' * (ns < 0)}{abs(ns) // 1000}.{abs(ns) % 1000:03}"
