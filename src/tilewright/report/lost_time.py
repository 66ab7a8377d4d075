"""Launches of an optimised case by the time that they lose to their floors, in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from tilewright.report.launch_rows import plain
from tilewright.report.quantity import duration, ratio
from tilewright.report.tables import open_table
from tilewright.store import query

FAR_OFF = 2.0
"""Times that a prediction may be off before it is marked."""
MATTERS = 0.01
"""Share of all time; what loses more of it without a reason is marked."""


def lost_time(run: Path, most: int) -> list[dict[str, Any]]:
    """The first `most` rows of the run's view `lost_time` that lose anything, by column.

    Raises:
        StoreError: the run is missing or damaged.
    """
    columns, rows = query(run, f"FROM lost_time WHERE lost_us > 0 LIMIT {most}")
    return [dict(zip(columns, row, strict=True)) for row in rows]


def show_lost_time(rows: Sequence[Mapping[str, Any]]) -> RenderableType:
    """A table of `lost_time`: what each takes beyond its floor, and the reason under it."""
    table = open_table("launch", "shape", "measured>", "floor>", "lost>", "of all>", "predicted>")
    for row in rows:
        many = f"{row['launches']} × " if row["launches"] > 1 else ""
        is_marked = row["share"] > MATTERS and row["why"] is None
        table.add_row(
            Group(Text(plain(f"{many}{row['name']}")), Text(plain(f"  {row['why'] or 'no decision says why'}"), "dim")),
            Text("[" + ", ".join(map(str, row["shape"])) + "]"),
            duration(row["measured_us"]),
            duration(row["floor_us"]),
            duration(row["lost_us"]),
            Text(f"{row['share']:.1%}", "bold red" if is_marked else ""),
            _predicted(row["predicted_us"], row["off"]),
        )
    return table


def _predicted(us: float | None, off: float | None) -> Text:
    if off is None or off <= FAR_OFF:
        return Text(duration(us))
    return Text(f"{duration(us)}, {ratio(off)} off", "bold red")
