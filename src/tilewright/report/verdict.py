"""The verdict on a run in a terminal: it comes before everything else."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from tilewright.report.launch_rows import plain
from tilewright.store.query import reading
from tilewright.trace.verdict.verdict import read_verdict


def verdict_words(run: Path) -> list[str]:
    """Its sentences; none where the run has no timeline.

    Raises:
        StoreError: the run is missing or damaged.
    """
    with reading(run) as connection:
        return read_verdict(connection)


def show_verdict(run: Path) -> RenderableType:
    """One line each, the first in bold, then an empty line; StoreError as `verdict_words`."""
    words = [plain(sentence) for sentence in verdict_words(run)]
    return Group(
        *(Text(sentence, "" if place else "bold") for place, sentence in enumerate(words)), *[Text()] * bool(words)
    )
