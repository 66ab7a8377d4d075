"""The folder of runs, and the names of runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path

from tilewright.records.errors import StoreError
from tilewright.records.home import home

_RUN_NAME = re.compile(r"\d{8}T\d{6}\.\d{6}Z-.*\.duckdb")

_instead: ContextVar[Path | None] = ContextVar("runs_dir", default=None)


def runs_dir() -> Path:
    """`$TILEWRIGHT_HOME/runs`, or `~/.local/share/tilewright/runs`; it may not exist yet."""
    return _instead.get() or home() / "runs"


@contextmanager
def runs_in(folder: Path) -> Iterator[None]:
    """Runs of this block are in `folder`: none of them becomes the user's latest run."""
    token = _instead.set(folder)
    try:
        yield
    finally:
        _instead.reset(token)


def new_run_path(case: str) -> Path:
    """A new path for a run of `case`: `<UTC timestamp>-<case>.duckdb`, in the runs folder.

    The microseconds keep names unique among processes, and names sort by time.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    slug = re.sub(r"[^A-Za-z0-9_.]+", "-", case).strip("-.")[:80] or "case"
    return runs_dir() / f"{stamp}-{slug}.duckdb"


def all_runs() -> list[Path]:
    """The runs in the runs folder, the oldest first; StoreError if it cannot be listed."""
    folder = runs_dir()
    try:
        names = sorted(entry.name for entry in folder.iterdir() if _RUN_NAME.fullmatch(entry.name))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot list the runs in {folder}: {error.strerror}") from error
    return [folder / name for name in names]


def latest_run() -> Path:
    """The newest run in the runs folder; StoreError if there is none."""
    found = all_runs()
    if not found:
        raise StoreError(f"no run in {runs_dir()}; `tilewright optimize TARGET` makes one")
    return found[-1]
