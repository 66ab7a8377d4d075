"""Marks Python's garbage collections, which run in the middle of anything that makes objects."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tilewright.measure.recording.compilation import Replacements
from tilewright.measure.recording.ranges import Marker

COLLECTING = "garbage collection"


@contextmanager
def marked_collections(mark: Marker, replacements: Replacements) -> Iterator[None]:
    """A range around every collection of this process while inside, but in compiled regions."""
    # One at a time: no collection begins within another.
    opened: list[Callable[[], None]] = []

    def collecting(phase: str, _: dict[str, Any]) -> None:
        if phase == "start":
            opened[:] = [mark(COLLECTING)]
        elif opened:
            opened.pop()()

    with replacements.listed(gc.callbacks, collecting):
        yield
