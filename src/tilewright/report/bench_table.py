"""One race of a bench as a table: times, rates, share of the limit, against each peer, errors."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilewright.records.measurement import Measurement
from tilewright.report.quantity import duration, nbytes, ratio
from tilewright.report.terminal import plain

OURS = "tilewright"


def show_race(title: str, rows: Sequence[Measurement], remarks: Sequence[str], unit: str) -> RenderableType:
    """`rows` of one suite, case and direction, fastest first; `remarks` below: who was refused and why.

    `unit` is `GB/s` or `TFLOP/s`, whichever the limit is one of. The columns on the right say how many
    times faster a row is than each peer (an implementation that is not tilewright's).
    """
    peers = [row for row in rows if not row.impl.startswith(OURS)]
    table = Table(title=plain(title), title_justify="left", title_style="bold")
    table.add_column("implementation")
    for heading in ("time", "p20–p80", "host", unit, "of limit", "peak", "error", "eager's"):
        table.add_column(heading, justify="right")
    for peer in peers:
        table.add_column(f"× {plain(peer.impl)}", justify="right")
    for row in sorted(rows, key=lambda row: row.median_us):
        rate = row.TFLOPs if unit == "TFLOP/s" else row.GBps
        table.add_row(
            plain(row.impl),
            duration(row.median_us),
            f"{_spread(row):.1%}",
            duration(row.host_us),
            "-" if rate is None else f"{rate:,.0f}" if rate >= 10 else f"{rate:.3g}",
            "-" if row.of_ceiling is None else f"{row.of_ceiling:.1%}",
            "-" if row.peak_bytes is None else nbytes(row.peak_bytes),
            _error(row.error),
            _error(row.eager_error),
            *(ratio(peer.median_us / row.median_us) for peer in peers),
            style="bold" if row.impl == OURS else "",
        )
    return Group(table, *(Text(plain(remark), "yellow") for remark in remarks))


def _spread(row: Measurement) -> float:
    """How far the middle three fifths of the repeats lie apart, relative to the median."""
    return (row.p80_us - row.p20_us) / row.median_us if row.median_us else 0.0


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
