"""Writes docs/scaling.md and docs/scaling.png from the scaling study: `python -m benchmarks.scaling_report`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tilewright.measure.racing.results import read_results
from tilewright.records.measurement import Measurement
from tilewright.report.quantity import count, duration, ratio

RESULTS = Path(__file__).parent / "results" / "h200" / "scaling.jsonl"
DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Series:
    """One parameter that grows while the others stay."""

    title: str
    pattern: str
    """Pattern of a row's case; its first group is the growing number."""
    expected: str

    def rows(self, rows: Sequence[Measurement]) -> list[tuple[int, Measurement]]:
        """The rows of the series by the number that grows."""
        found = [(match, row) for row in rows if (match := re.fullmatch(self.pattern, row.case))]
        return sorted(((int(match[1]), row) for match, row in found), key=lambda pair: pair[0])


SERIES = (
    Series("Product of n × n matrices, bf16", r"matmul n(\d+) bf16", "2n³ FLOPs: eight times for twice the size"),
    Series("Product of n × n matrices, fp32", r"matmul n(\d+) fp32", "2n³ FLOPs: eight times for twice the size"),
    Series("MLP: width D", r"mlp D(\d+) L4 B4096 bf16", "6·B·L·D² FLOPs: four times for twice the width"),
    Series("MLP: layers L", r"mlp D2048 L(\d+) B4096 bf16", "linear"),
    Series("MLP: batch B", r"mlp D2048 L4 B(\d+) bf16", "linear once the weights' own bytes and launches are small"),
    Series("Training: steps", r"train steps(\d+) .*", "linear, plus making the model once"),
)


def table(series: Series, rows: Sequence[Measurement]) -> str:
    """Markdown: measured beside predicted, and by how much each grew from the row before."""
    name = re.sub(r"\W+", " ", series.title)
    lines = [
        f"### {series.title}\n\nExpected: {series.expected}.\n",
        f"<!-- table: {name} -->",
        "| size | measured | predicted | measured / predicted | TFLOP/s | grew | predicted to grow |",
        "|---:|---:|---:|---:|---:|---:|---:|",
    ]
    before: Measurement | None = None
    for size, row in series.rows(rows):
        assert row.predicted_us is not None, "every row of the study has a prediction"
        rate = "-" if row.TFLOPs is None else f"{row.TFLOPs:,.3g}"
        grew = expected = ""
        if before is not None and before.predicted_us:
            grew, expected = ratio(row.median_us / before.median_us), ratio(row.predicted_us / before.predicted_us)
        figures = [count(size), duration(row.median_us), duration(row.predicted_us)]
        lines.append(f"| {' | '.join([*figures, ratio(row.median_us / row.predicted_us), rate, grew, expected])} |")
        before = row
    return "\n".join([*lines, "<!-- /table -->"])


def points(rows: Sequence[Measurement]) -> list[dict[str, Any]]:
    """The points of the plot: a measured and a predicted one for each row."""
    return [
        {"series": series.title, "size": size, "µs": us, "time": time}
        for series in SERIES
        for size, row in series.rows(rows)
        for time, us in (("measured", row.median_us), ("predicted", row.predicted_us))
    ]


def draw(rows: Sequence[Measurement], path: Path) -> None:
    """One panel a series, both axes logarithmic: a slope is an exponent."""
    import altair as alt

    panels = [
        alt.Chart(alt.InlineData(values=[p for p in points(rows) if p["series"] == series.title]))
        .mark_line(point=True)
        .encode(
            x=alt.X("size:Q", scale=alt.Scale(type="log", base=2), title=None),
            y=alt.Y("µs:Q", scale=alt.Scale(type="log"), title="µs"),
            color=alt.Color("time:N", title=None),
            strokeDash="time:N",
        )
        .properties(title=series.title, width=260, height=200)
        for series in SERIES
    ]
    alt.concat(*panels, columns=3).save(str(path), scale_factor=2)


def main() -> None:
    rows = read_results(RESULTS)
    draw(rows, DOCS / "scaling.png")
    where = rows[0]
    text = f"""# How time grows

{where.device}, torch {where.torch}, {where.date[:10]}; medians, L2 flushed before each call. Eager PyTorch.
Measured by `python -m benchmarks.scaling --device cuda`, written by `python -m benchmarks.scaling_report`.

A prediction is the sum of the floors of the kernels that eager runs: each the larger of its FLOPs over the
measured matmul or vector rate, its bytes over the measured bandwidth of the level that holds them, and one launch.
Nothing in it is fitted to the times beside it. Small sizes lie above it: a kernel of a few programs leaves most
of the device idle, and eager needs longer to launch a kernel than the device to run it.

![Measured and predicted time over size](scaling.png)

"""
    DOCS.joinpath("scaling.md").write_text(
        text + "\n\n".join(table(series, rows) for series in SERIES) + "\n", encoding="utf-8"
    )


if __name__ == "__main__":
    main()
