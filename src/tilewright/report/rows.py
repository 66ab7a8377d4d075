"""The result of a query as a table, or a row after the other where the table would be too wide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tilewright.report.launch_rows import plain
from tilewright.report.tables import open_table

_NARROWEST = 16
"""Characters to which a column of text may be folded."""


def show_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]], header: bool = True) -> RenderableType:
    """Numbers right-aligned, floats with six digits (JSON has all of them), long text wrapped, not cut.

    Where that leaves a column fewer than `_NARROWEST` characters, each row is a list of its columns.
    """
    numeric = [all(isinstance(value, int | float) for value in values) for values in zip(*rows, strict=True)]
    ends = [">" if right else "" for right in numeric] or [""] * len(columns)
    table = open_table(*(plain(name) + end for name, end in zip(columns, ends, strict=True)))
    table.show_header = header
    cells = [list(map(_cell, row)) for row in rows]
    for column in table.columns:
        column.overflow = "fold"
    for row in cells:
        table.add_row(*row)
    longest = [max(cell.cell_len for cell in column) for column in zip(*cells, strict=True)]
    return _TableOrList(table, columns, cells, sum(2 + min(length, _NARROWEST) for length in longest))


@dataclass(frozen=True)
class _TableOrList:
    """`table`, or a list of `rows` where fewer characters than `narrowest` are left for it."""

    table: Table
    columns: Sequence[str]
    rows: Sequence[Sequence[Text]]
    narrowest: int

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.narrowest <= options.max_width:
            yield self.table
            return
        for number, row in enumerate(self.rows, 1):
            listed = open_table("", "")
            listed.show_header = False
            listed.columns[1].overflow = "fold"
            for name, cell in zip(self.columns, row, strict=True):
                listed.add_row(Text(plain(name), "dim"), cell)
            yield Text(f"row {number}", "bold")
            yield listed


def _cell(value: Any) -> Text:
    if value is None:
        return Text("NULL", "dim")
    # From a million on six digits do not cover the integer part.
    digits = ".6g" if isinstance(value, float) and abs(value) < 1e6 else ".1f"
    return Text(f"{value:{digits}}" if isinstance(value, float) else plain(str(value)))
