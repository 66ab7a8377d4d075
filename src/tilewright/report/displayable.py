"""Base of results that display themselves: with rich, with `print`, at Python's prompt and in a notebook.

A dataclass that is one says `@dataclass(repr=False)`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

_COLUMNS = 160


class Displayable(ABC):
    """A result drawn by `__rich__`; its text is the same, 160 columns wide."""

    @abstractmethod
    def __rich__(self) -> Any: ...

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=_COLUMNS)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(str(self))}</pre>"
