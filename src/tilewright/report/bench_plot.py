"""Plots bench rows over sizes: a panel per direction and dtype, a line per implementation."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.records.atomic_file import ensure_writable, writing
from tilewright.records.errors import UsageError
from tilewright.records.measurement import Measurement

if TYPE_CHECKING:
    import altair

_FORMATS = (".png", ".svg", ".html", ".json")


def check(path: Path) -> None:
    """UsageError or StoreError if a plot cannot be written to `path`; call it before measuring."""
    import importlib.util

    if path.suffix not in _FORMATS:
        raise UsageError(f"cannot draw {path.name}: the name of a plot ends with {', '.join(_FORMATS)}")
    if not importlib.util.find_spec("altair"):
        raise UsageError("plots need the package altair, and vl-convert-python for PNG and SVG")
    ensure_writable(path, "plot")


def draw(rows: Sequence[Measurement], unit: str, path: Path) -> None:
    """Write the plot of `rows` as PNG, SVG, HTML or Vega-Lite JSON, by the ending of `path`.

    `unit` is `GB/s` or `TFLOP/s`; sizes are drawn in the order of `rows`.
    """
    with writing(path, "plot"):
        # The scale is for PNG; vector formats ignore it. An HTML plot embeds its scripts and uses no network.
        chart(rows, unit).save(str(path), scale_factor=2, inline=path.suffix == ".html")


def chart(rows: Sequence[Measurement], unit: str) -> altair.FacetChart:
    """The plot as an Altair chart: median and the band from p20 to p80 over sizes, and the limit dashed."""
    import altair as alt

    points = [_point(row, unit) for row in rows]
    order, panels = (list(dict.fromkeys(point[key] for point in points)) for key in ("size", "panel"))
    # By default the legend has the opacity of the bands.
    colour = alt.Color("implementation:N", legend=alt.Legend(symbolOpacity=1))
    base = alt.Chart(alt.InlineData(values=points)).encode(x=alt.X("size:N", sort=order, title=None), color=colour)
    # With a single size there is no line, so each median is also a point.
    lines = base.mark_line(point=True).encode(
        y=alt.Y("rate:Q", title=unit), tooltip=["implementation:N", "size:N", "rate:Q", "limit:Q"]
    )
    bands = base.mark_area(opacity=0.15).encode(y=alt.Y("low:Q"), y2=alt.Y2("high:Q"))
    limits = base.mark_line(color="gray", strokeDash=[4, 4]).encode(y="mean(limit):Q", color=alt.value("gray"))
    layers = alt.layer(bands, lines, limits).properties(width=60 + 40 * len(order), height=260)
    return layers.facet(facet=alt.Facet("panel:N", title=None, sort=panels), columns=2)


def _point(row: Measurement, unit: str) -> dict[str, Any]:
    size, _, dtype = row.case.rpartition(" ")
    rate = (row.TFLOPs if unit == "TFLOP/s" else row.GBps) or 0.0
    return {
        "panel": f"{row.suite} {row.direction} {dtype}",
        "size": size or row.case,
        "implementation": row.impl,
        "rate": rate,
        "low": rate * row.median_us / row.p80_us,
        "high": rate * row.median_us / row.p20_us,
        "limit": rate / row.of_ceiling if row.of_ceiling else None,
    }
