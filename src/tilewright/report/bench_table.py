"""One race of a bench as a table: times, rates, share of the limit, against each peer, errors."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from tilewright.records.measurement import Measurement
from tilewright.report.launch_rows import plain
from tilewright.report.quantity import duration, nbytes, speed_of
from tilewright.report.tables import FittedTable

OURS = "tilewright"


def show_race(title: str, rows: Sequence[Measurement], remarks: Sequence[str], unit: str) -> RenderableType:
    """`rows` of one suite, case and direction, fastest first; below, `remarks`: refusals and notes.

    `unit` is `GB/s` or `TFLOP/s`, whichever the limit is one of. The columns on the right say how many
    times faster a row is than each peer (an implementation that is not tilewright's).
    """
    peers = [row for row in rows if not row.impl.startswith(OURS)]
    figures_of = ("time", "p20–p80", "host", unit, "of limit", "peak", "error", "eager's")
    columns = ["implementation", *(f"{name}>" for name in (*figures_of, *(f"× {plain(peer.impl)}" for peer in peers)))]
    table = FittedTable(columns, ("host", "peak", "p20–p80", "eager's", "× eager", "error"), plain(title))
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
            *(speed_of(row, peer) for peer in peers),
            style="bold" if row.impl == OURS else "",
        )
    return Group(table, *(Text(plain(remark), "yellow") for remark in remarks))


def _spread(row: Measurement) -> float:
    """The distance from p20 to p80, relative to the median."""
    return (row.p80_us - row.p20_us) / row.median_us if row.median_us else 0.0


def _error(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"
