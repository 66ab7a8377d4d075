"""Tables of the terminal: without borders, and alternatives by the terminal's width."""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table


class FirstThatFits:
    """The first alternative that fits the terminal's width, else the last."""

    def __init__(self, *alternatives: RenderableType) -> None:
        self.alternatives = alternatives

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        *wider, narrowest = self.alternatives
        unbounded = options.update(max_width=10_000)
        for alternative in wider:
            if console.measure(alternative, options=unbounded).maximum <= options.max_width:
                yield alternative
                return
        yield narrowest


def open_table(*columns: str) -> Table:
    """A table without borders. `>` after a name right-aligns its column and keeps it on one line."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in columns:
        right = name.endswith(">")
        table.add_column(name.removesuffix(">"), justify="right" if right else "left", no_wrap=right)
    return table
