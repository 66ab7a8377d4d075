"""Where runs live, and how they are named."""

from __future__ import annotations

import os
import re
from datetime import UTC, datetime
from pathlib import Path

from tilewright.records.errors import StoreError

_RUN_NAME = re.compile(r"\d{8}T\d{6}\.\d{6}Z-.*\.duckdb")


def runs_dir() -> Path:
    """`$TILEWRIGHT_HOME/runs`, or `~/.local/share/tilewright/runs`; it may not exist yet."""
    home = os.environ.get("TILEWRIGHT_HOME")
    base = Path(home).expanduser() if home else Path.home() / ".local" / "share" / "tilewright"
    return base / "runs"


def new_run_path(case: str) -> Path:
    """A fresh name for a run of `case`: `<UTC timestamp>-<case>.duckdb`, in the runs folder.

    Microseconds keep two processes that start together apart and the names in order of time.
    """
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%S.%fZ")
    slug = re.sub(r"[^A-Za-z0-9_.]+", "-", case).strip("-.")[:80] or "case"
    return runs_dir() / f"{stamp}-{slug}.duckdb"


def latest_run() -> Path:
    """The newest run in the runs folder; StoreError if there is none."""
    folder = runs_dir()
    try:
        names = sorted(entry.name for entry in folder.iterdir() if _RUN_NAME.fullmatch(entry.name))
    except FileNotFoundError:
        names = []
    except OSError as error:
        raise StoreError(f"cannot list the runs in {folder}: {error.strerror}") from error
    if not names:
        raise StoreError(f"no run in {folder}; `tilewright optimize TARGET` makes one")
    return folder / names[-1]
