"""Base of results that display themselves: with rich, with `print`, at Python's prompt and in a notebook.

A dataclass that is one says `@dataclass(repr=False)`.
"""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.records.errors import UsageError

_COLUMNS = 160


class Displayable(ABC):
    """A result drawn by `__rich__`; its text is the same, 160 columns wide, and in a notebook it has HTML tables."""

    @abstractmethod
    def __rich__(self) -> Any: ...

    def page_file(self) -> Path | None:
        """The result's page, if it has one."""
        return None

    def frame(self) -> Frame:
        """The page within a notebook, which then holds a copy of it; UsageError if this result has none."""
        if (page := self.page_file()) is None:
            raise UsageError(f"{type(self).__name__} has no page")
        return Frame(page)

    def __str__(self) -> str:
        from rich.console import Console

        # Neither styles nor a notebook's own output, whatever the process writes to.
        console = Console(file=io.StringIO(), width=_COLUMNS, color_system=None, force_jupyter=False)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        from tilewright.report.html import as_html

        return as_html(self, self.page_file())


@dataclass(frozen=True)
class Frame:
    """A page that a notebook shows in a frame."""

    page: Path

    def _repr_html_(self) -> str:
        from tilewright.report.html import framed

        return framed(self.page)
