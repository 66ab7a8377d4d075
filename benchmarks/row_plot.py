"""Draws the row kernels over the length of a row, from the result files: `python -m benchmarks.row_plot [PNG]`.

One panel an operator, forward in bf16, full-sized workloads: GB/s beside its peers, and a copy of as many bytes dashed.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.summary import LARGE, ROOT, Results, elements, read_all
from benchmarks.tables import columns_of

if TYPE_CHECKING:
    import altair

PICTURE = Path(__file__).parents[1] / "docs" / "rows.png"
SUITES = {"softmax": "softmax", "layer_norm": "layer norm", "rms_norm": "RMS norm", "cross_entropy": "cross entropy"}
IMPLS = {"tilewright": "tilewright", "liger": "Liger", "inductor": "Inductor", "torch": "PyTorch"}
COLOURS = ("#a8326b", "#e39b3c", "#4c78a8", "#9aa3ad")


def points(results: Results, suite: str) -> list[dict[str, Any]]:
    """The points of one operator's plot, from the shortest row to the longest."""
    rows = [
        row
        for row in results.rows
        if (row.suite, row.direction) == (suite, "fwd") and row.impl in IMPLS
        if row.case.endswith("bf16") and elements(row.case) >= LARGE
    ]
    copy = results.copy_GBps()
    return [
        {"columns": f"{columns_of(row):,}", "GBps": row.GBps, "way": IMPLS[row.impl], "copy": copy}
        for row in sorted(rows, key=columns_of)
    ]


def chart(results: Results) -> altair.ConcatChart:
    """The four panels as an Altair chart."""
    import altair as alt

    colour = alt.Color("way:N", title=None, scale=alt.Scale(domain=[*IMPLS.values()], range=[*COLOURS]))
    panels = []
    for suite, title in SUITES.items():
        drawn = points(results, suite)
        order = list(dict.fromkeys(point["columns"] for point in drawn))
        base = alt.Chart(alt.InlineData(values=drawn)).encode(
            x=alt.X("columns:N", sort=order, title="columns", axis=alt.Axis(labelAngle=-45, grid=False))
        )
        lines = base.mark_line(point=alt.OverlayMarkDef(size=36), strokeWidth=2.5).encode(
            y=alt.Y("GBps:Q", title="GB/s", scale=alt.Scale(domain=[0, 4600])), color=colour
        )
        copy = base.mark_line(color="black", strokeDash=[5, 4], strokeWidth=1.2).encode(y="mean(copy):Q")
        panels.append(alt.layer(lines, copy).properties(title=f"{title}, forward, bf16", width=400, height=210))
    drawn_together: altair.ConcatChart = alt.concat(*panels, columns=2).configure_view(strokeWidth=0)
    return drawn_together


def main(arguments: Sequence[str]) -> None:
    path = Path(arguments[0]) if arguments else PICTURE
    chart(read_all(ROOT / "h200")).save(str(path), scale_factor=2)
    print(f"wrote {path}")


if __name__ == "__main__":
    main(sys.argv[1:])
