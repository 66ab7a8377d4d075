"""What shows itself: in a terminal by rich, by `print`, and in a notebook."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

_COLUMNS = 160


class Shown(ABC):
    """A result that `__rich__` draws, as text wherever text is asked for."""

    @abstractmethod
    def __rich__(self) -> Any: ...

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(width=_COLUMNS)
        with console.capture() as captured:
            console.print(self)
        return captured.get()

    def _repr_html_(self) -> str:
        import html

        return f"<pre>{html.escape(str(self))}</pre>"
