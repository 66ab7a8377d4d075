"""Reads one side of a comparison: runs, or a trace."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tilewright.records.errors import StoreError
from tilewright.store import Run
from tilewright.trace.analysis import analyse
from tilewright.trace.compare.diff import RunSteps, read_run, runs_of
from tilewright.trace.formats.collection import traces_of
from tilewright.trace.load import load_traces

_RUN = b"DUCK"
_MAGIC = slice(8, 12)


def read_side(side: Path, tell: Callable[[str], None] = lambda _: None) -> list[RunSteps]:
    """The runs of a folder, or the traces of one without runs; one run, or one trace.

    `tell` is called before what takes long.

    Raises:
        StoreError: the folder has no runs, or a run no timeline.
        TraceError: it is neither a folder, a run nor a trace.
    """
    if side.is_dir():
        traces = [] if any(side.glob("*.duckdb")) else traces_of(side)
        return [_read_trace(path, tell) for path in traces] or [read_run(path) for path in runs_of(side)]
    try:
        with side.open("rb") as file:
            head = file.read(_MAGIC.stop)
    except FileNotFoundError as error:
        raise StoreError(f"no run or trace at {side}") from error
    except OSError as error:
        raise StoreError(f"cannot read {side}: {error.strerror}") from error
    if head[_MAGIC] == _RUN:
        return [read_run(side)]
    return [_read_trace(side, tell)]


def _read_trace(path: Path, tell: Callable[[str], None]) -> RunSteps:
    """Load the trace into a temporary run."""
    with tempfile.TemporaryDirectory(prefix="tilewright-") as folder:
        run = Path(folder) / "run.duckdb"
        with Run.create(run, command="", target=str(path), case=path.name) as made:
            load_traces([path], made.connection, tell)
            analyse(made.connection)
        return replace(read_run(run), path=path, created_us=path.stat().st_mtime_ns // 1000)
