"""One race of a bench as a table: times, rates, share of the limit, against each peer, errors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilewright.records.measurement import Measurement
from tilewright.report.launch_rows import plain
from tilewright.report.quantity import duration, nbytes, speed_of
from tilewright.report.tables import FirstThatFits, open_table

OURS = "tilewright"


def show_race(title: str, rows: Sequence[Measurement], remarks: Sequence[str], unit: str) -> RenderableType:
    """`rows` of one suite, case and direction, fastest first; below, `remarks`: refusals and notes.

    `unit` is `GB/s` or `TFLOP/s`, whichever the limit is one of. The columns on the right say how many
    times faster a row is than each peer (an implementation that is not tilewright's).
    """
    ranked = sorted(rows, key=lambda row: row.median_us)
    tables = [_race_table(title, ranked, unit, left_out) for left_out in ((), ("host", "peak"), _LEFT_OUT)]
    return Group(FirstThatFits(*tables), *(Text(plain(remark), "yellow") for remark in remarks))


_LEFT_OUT = ("p20–p80", "host", "peak", "eager's", "× eager")
"""Columns that a narrow terminal omits."""


def _race_table(title: str, rows: Sequence[Measurement], unit: str, left_out: Sequence[str]) -> Table:
    peers = [row for row in rows if not row.impl.startswith(OURS) and f"× {row.impl}" not in left_out]
    headings = ("time", "p20–p80", "host", unit, "of limit", "peak", "error", "eager's")
    shown = [heading not in left_out for heading in headings]
    figures_of = (*compress(headings, shown), *(f"× {plain(peer.impl)}" for peer in peers))
    table = open_table("implementation", *(f"{heading}>" for heading in figures_of))
    table.title, table.title_justify, table.title_style = plain(title), "left", "bold"
    for row in rows:
        rate = row.TFLOPs if unit == "TFLOP/s" else row.GBps
        figures = (
            duration(row.median_us),
            f"{_spread(row):.1%}",
            duration(row.host_us),
            "-" if rate is None else f"{rate:,.0f}" if rate >= 10 else f"{rate:.3g}",
            "-" if row.of_ceiling is None else f"{row.of_ceiling:.1%}",
            "-" if row.peak_bytes is None else nbytes(row.peak_bytes),
            _error(row.error),
            _error(row.eager_error),
        )
        table.add_row(
            plain(row.impl),
            *compress(figures, shown),
            *(speed_of(row, peer) for peer in peers),
            style="bold" if row.impl == OURS else "",
        )
    return table


def _spread(row: Measurement) -> float:
    """The distance from p20 to p80, relative to the median."""
    return (row.p80_us - row.p20_us) / row.median_us if row.median_us else 0.0


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
