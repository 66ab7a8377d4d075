"""Output of every verb: tables, JSON, and the current stage."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.text import Text


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
    """A spinner on stderr with the current stage and its seconds; nothing if stderr is no terminal."""
    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda _: None
        return
    with console.status("") as status:
        yield lambda stage: status.update(_Stage(stage))


class _Stage:
    """A stage that has run for some time, from two seconds on with their number."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = time.monotonic()

    def __rich__(self) -> Text:
        seconds = int(time.monotonic() - self._began)
        return Text(f"{self._name}, {seconds} s" if seconds >= 2 else self._name)
