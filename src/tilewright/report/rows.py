"""Query results in a terminal: a user's query without units, a view of the run with the units of its columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from tilewright.records.measurement import rate_figure
from tilewright.report.launch_rows import plain
from tilewright.report.quantity import duration, nbytes, ratio
from tilewright.report.queries import Answer
from tilewright.report.tables import FittedTable, open_table
from tilewright.report.views import View

_NARROWEST = 16
"""Characters to which a column of text may be folded."""
_WIDTHS = (60, 40, 28)
_CUT = ("name", "operator")
"""Columns of names, which a template of C++ makes very long: JSON and SQL have all of them."""


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
    return TableOrList(table, columns, cells, sum(2 + min(length, _NARROWEST) for length in longest))


@dataclass(frozen=True)
class TableOrList:
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


def show_view(view: View, answer: Answer, most: int = 10) -> RenderableType:
    """The first `most` rows under the view's title, without columns that are empty; those `marked` in red.

    A narrow terminal shows them without the first of the columns that the view can do without, or the first two, and
    so on: figures are never cut.
    """
    records = answer.records()
    kept = [name for name in answer.columns if name != "marked" and any(row[name] is not None for row in records)]
    numeric = [all(isinstance(row[name], int | float | None) for row in records) for name in kept]
    columns = [label_of(name) + (">" if right else "…") for name, right in zip(kept, numeric, strict=True)]
    table = FittedTable(columns, [*map(label_of, view.left_out)], widths=_WIDTHS, cut=_CUT)
    for row in records[:most]:
        style = "bold red" if row.get("marked") else ""
        table.add_row(*(Text(figure(name, row[name])) for name in kept), style=style)
    parts: list[RenderableType] = [Text(f"\n{view.title}", "bold"), table]
    if answer.total > most:
        parts.append(Text(f"and {answer.total - most:,} more", "dim"))
    if answer.problem:
        parts.append(Text(answer.problem, "yellow"))
    return Group(*parts)


def label_of(column: str) -> str:
    """A column's name without its unit, as the page has it.

    >>> label_of("lost_ms"), label_of("of_all_percent"), label_of("percent"), label_of("GBps")
    ('lost', 'of all', 'percent', 'bandwidth')
    """
    if column in _RATES:
        return _RATES[column][0]
    return re.sub(r"(?<=.)_(ns|us|ms|percent)$", "", column).replace("_", " ")


def figure(column: str, value: Any) -> str:
    """A value with the unit that ends its column's name.

    >>> figure("lost_ms", 1.5), figure("percent", 12.34), figure("times_floor", 2.0), figure("TFLOPs", 0.002)
    ('1.50 ms', '12.3 %', '2.00×', '2 GFLOP/s')
    """
    if value is None:
        return "-"
    if isinstance(value, str | bool):
        return plain(str(value))
    unit = column.rpartition("_")[2]
    if unit in _MICROSECONDS:
        return duration(value * _MICROSECONDS[unit])
    if unit == "bytes":
        return nbytes(value)
    if unit == "percent":
        return f"{value:.1f} %"
    if column.startswith("times_"):
        return ratio(value)
    if column in _RATES:
        return rate_figure(value, _RATES[column][1])
    return f"{value:,}" if isinstance(value, int) else f"{value:.3g}"


_RATES = {"TFLOPs": ("FLOP rate", "TFLOP/s"), "GBps": ("bandwidth", "GB/s")}
_MICROSECONDS = {"ns": 1e-3, "us": 1.0, "ms": 1e3}
