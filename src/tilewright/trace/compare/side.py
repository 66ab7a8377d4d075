"""Reads one side of a comparison: runs, a trace, or a list of step times."""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tilewright.records.errors import StoreError
from tilewright.store import Run
from tilewright.trace.analysis import analyse
from tilewright.trace.compare.diff import RunSteps, read_run, runs_of
from tilewright.trace.load import load_traces

_RUN = b"DUCK"
_MAGIC = slice(8, 12)
_HEAD = 4096
_TIMES = re.compile(rb"[\s\[]*\d[\d\s.,eE+-]*\]?\s*")
_MOST_BYTES = 1 << 26


def read_side(side: Path, tell: Callable[[str], None] = lambda _: None) -> list[RunSteps]:
    """The runs of a folder, one run, one trace, or a text of step times in microseconds, separated by blanks or commas.

    `tell` hears what takes long.

    Raises:
        StoreError: the folder has no runs, a run no timeline; or a step time is no positive number.
        TraceError: it is none of these, and no trace.
    """
    if side.is_dir():
        return [read_run(path) for path in runs_of(side)]
    try:
        with side.open("rb") as file:
            head = file.read(_HEAD)
    except FileNotFoundError as error:
        raise StoreError(f"no run, trace or list of step times at {side}") from error
    except OSError as error:
        raise StoreError(f"cannot read {side}: {error.strerror}") from error
    if head[_MAGIC] == _RUN:
        return [read_run(side)]
    return [_read_times(side) if _TIMES.fullmatch(head) else _read_trace(side, tell)]


def _read_times(path: Path) -> RunSteps:
    if path.stat().st_size > _MOST_BYTES:
        raise StoreError(f"{path} is too large for a list of step times")
    words = re.split(r"[\s,]+", path.read_text("utf-8", "replace").strip("[] \t\r\n,"))
    steps = []
    for word in words:
        try:
            us = float(word)
        except ValueError:
            us = math.nan
        if not 0 < us < math.inf:
            raise StoreError(f"{path} is not a list of step times: {word[:40]!r} is not a positive number")
        steps.append(us)
    return RunSteps(path, path.stat().st_mtime_ns // 1000, tuple(steps), {}, {})


def _read_trace(path: Path, tell: Callable[[str], None]) -> RunSteps:
    """Load the trace into a temporary run."""
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        run = Path(folder) / "run.duckdb"
        with Run.create(run, command="", target=str(path), case=path.name) as made:
            load_traces([path], made.connection, tell)
            analyse(made.connection)
        return replace(read_run(run), path=path, created_us=path.stat().st_mtime_ns // 1000)
