"""Tables of the terminal: without borders, and narrower where the terminal is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import compress

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table

_WIDTHS = (None, 48, 32, 24)
"""Widths to try for columns whose name ends with `…`: their text wraps before other columns are left out."""


@dataclass
class FittedTable:
    """A table that a narrow terminal shows without the first of `left_out`, or the first two, and so on.

    A column in which every cell is empty or `-` is left out too.
    """

    columns: Sequence[str]
    left_out: Sequence[str] = ()
    title: str | None = None
    widths: Sequence[int | None] = _WIDTHS
    cut: Sequence[str] = ()
    """Columns whose text ends in `…` where that of others wraps."""
    _rows: list[tuple[Sequence[RenderableType], str]] = field(default_factory=list)

    def add_row(self, *cells: RenderableType, style: str = "") -> None:
        """A cell for each column."""
        self._rows.append((cells, style))

    def whole(self) -> Table:
        """With every column, as wide as its text."""
        return self._table(None, ())

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        without = [self.left_out[:number] for number in range(len(self.left_out) + 1)]
        fits = [*((width, ()) for width in self.widths), *((self.widths[-1], some) for some in without[1:])]
        for width, left_out in fits:
            table = self._table(width, left_out)
            if console.measure(table, options=options.update(max_width=10_000)).maximum <= options.max_width:
                break
        yield table

    def _table(self, width: int | None, left_out: Sequence[str]) -> Table:
        kept = [
            name.rstrip(">…") not in left_out and bool(not cells or {*map(str, cells)} - {"", "-"})
            for name, *cells in zip(self.columns, *(cells for cells, _ in self._rows), strict=True)
        ]
        table = open_table(*compress(self.columns, kept))
        table.title, table.title_justify, table.title_style = self.title, "left", "bold"
        for name, column in zip(compress(self.columns, kept), table.columns, strict=True):
            if name.endswith("…"):
                column.max_width, column.no_wrap = width, column.header in self.cut
                column.overflow = "ellipsis" if column.no_wrap else "fold"
        for cells, style in self._rows:
            table.add_row(*compress(cells, kept), style=style)
        return table


def open_table(*columns: str) -> Table:
    """A table without borders. `>` after a name right-aligns its column and keeps it on one line."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in columns:
        right = name.endswith(">")
        table.add_column(name.rstrip(">…"), justify="right" if right else "left", no_wrap=right)
    return table
