"""Output of every verb: tables, JSON, and the current stage."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from tilewright.records.progress import watched
from tilewright.report.progress import ProgressLine


def show(renderable: Any) -> None:
    """Print as wide as `COLUMNS` or the terminal, or 160 columns without either; with `NO_COLOR` without styles."""
    columns = os.environ.get("COLUMNS", "")
    has_width = sys.stdout.isatty() or (columns.isdigit() and int(columns) > 0)
    width = None if has_width else 160
    console = Console(width=width, color_system=None) if os.environ.get("NO_COLOR") else Console(width=width)
    # A path that is longer than a line stays whole, so that it can be copied.
    console.print(renderable, crop=False)


def print_json(value: Any) -> None:
    print(json.dumps(value, indent=1, default=str))


@contextmanager
def working(what: str, quiet: bool) -> Iterator[None]:
    with stages(quiet) as tell:
        tell(what)
        yield


@contextmanager
def stages(quiet: bool) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr with the stage, what it counts and its seconds; nothing if stderr is no terminal."""
    console = Console(stderr=True)
    # rich takes any stream for a terminal under FORCE_COLOR, which notebooks set.
    if quiet or not sys.stderr.isatty():
        yield lambda _: None
        return
    line = ProgressLine("")
    with watched(line.count), console.status(line):
        yield line.enter
