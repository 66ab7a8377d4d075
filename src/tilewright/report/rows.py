"""The result of a query as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from tilewright.report.tables import open_table
from tilewright.report.terminal import plain


def show_rows(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> Table:
    """Numbers right-aligned, floats with six digits (JSON has all of them), long text wrapped, not cut."""
    numeric = [all(isinstance(value, int | float) for value in values) for values in zip(*rows, strict=True)]
    ends = [">" if right else "" for right in numeric] or [""] * len(columns)
    table = open_table(*(plain(name) + end for name, end in zip(columns, ends, strict=True)))
    for column in table.columns:
        column.overflow = "fold"
    for row in rows:
        table.add_row(*map(_cell, row))
    return table


def _cell(value: Any) -> Text:
    if value is None:
        return Text("NULL", "dim")
    # From a million on six digits do not cover the integer part.
    digits = ".6g" if isinstance(value, float) and abs(value) < 1e6 else ".1f"
    return Text(f"{value:{digits}}" if isinstance(value, float) else plain(str(value)))
