"""Output of every verb: tables, JSON, and the current stage."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console

from tilewright.records.progress import watched
from tilewright.report.progress import ProgressLine


def show(renderable: Any) -> None:
    """Print as wide as the terminal, or 160 columns without one."""
    console = Console()
    Console(width=console.width if console.is_terminal else 160).print(renderable)


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
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    line = ProgressLine("")
    with watched(line.count), console.status(line):
        yield line.enter
