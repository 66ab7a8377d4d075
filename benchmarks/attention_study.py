"""Writes docs/attention_study.md and .png, attention written out against fused: `python -m benchmarks.attention_study`.

The rows are measured by

    tilewright bench attention --sweep study --impl tilewright,eager --seconds 0.2 --device cuda --out FILE
    tilewright bench attention --sweep memory --impl tilewright,eager --direction fwd,fwd+bwd --seconds 0.2 \
        --device cuda --out FILE

where FILE is benchmarks/results/h200/attention.jsonl; FLOPs, bytes and predictions are the account's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.attention import case
from tilewright.account import account
from tilewright.hardware.profiles import profile_for
from tilewright.measure.results import read_results
from tilewright.records.measurement import Direction, Measurement
from tilewright.report.quantity import count, duration, nbytes, ratio

RESULTS = Path(__file__).parent / "results" / "h200" / "attention.jsonl"
DOCS = Path(__file__).parents[1] / "docs"
CASE = re.compile(r"d(\d+) S(\d+) full B(\d+) H1")
BATCH = 8
"""Of the study; the rows of the memory sweep have a batch of one."""
ACCOUNTED_WIDTH = 64
WAYS = {"eager": "written out", "tilewright": "fused"}
DIRECTIONS: dict[Direction, str] = {"fwd": "Forward, inference", "bwd": "Backward", "fwd+bwd": "Training step"}
MEMORY: tuple[Direction, Direction] = ("fwd", "fwd+bwd")
"""Inference and training; the memory of a backward alone leaves out what is saved for it."""
REFERENCE = "d 16, S 4096: 2.4 times as fast, forward and backward"


@dataclass(frozen=True)
class Point:
    """One size of the study, both ways; a way that was refused has no row."""

    width: int
    length: int
    batch: int
    direction: Direction
    rows: dict[str, Measurement]

    def gain(self) -> str:
        """How many times as fast the fused way is, or `-`."""
        if len(self.rows) < len(WAYS):
            return "-"
        return ratio(self.rows["eager"].median_us / self.rows["tilewright"].median_us)

    def time(self, way: str) -> str:
        """The median of a way."""
        return duration(self.rows[way].median_us) if way in self.rows else "does not fit"

    def peak(self, way: str) -> str:
        """The peak memory of a way."""
        return nbytes(self.rows[way].peak_bytes or 0) if way in self.rows else "does not fit"


def points(rows: Sequence[Measurement]) -> list[Point]:
    """The sizes that were measured, in order."""
    found: dict[tuple[int, int, int, Direction], dict[str, Measurement]] = {}
    for row in rows:
        match = CASE.fullmatch(row.case)
        if match and row.impl in WAYS:
            width, length, batch = map(int, match.groups())
            found.setdefault((batch, width, length, row.direction), {})[row.impl] = row
    if not found:
        raise SystemExit(f"no rows of the study; see the commands in {__file__}")
    return [
        Point(width, length, batch, direction, found[batch, width, length, direction])
        for batch, width, length, direction in sorted(found)
    ]


def times(study: Sequence[Point], direction: Direction) -> str:
    """Markdown: a row for each length, a column for each head size: both times and their ratio."""
    own = {(p.width, p.length): p for p in study if p.direction == direction}
    widths, lengths = (sorted({key[i] for key in own}) for i in range(2))
    lines = [
        f"### {DIRECTIONS[direction]}\n",
        f"| S | {' | '.join(f'd {width}' for width in widths)} |",
        f"|---:|{'---:|' * len(widths)}",
    ]
    for length in lengths:
        cells = [own[width, length] for width in widths]
        shown = [f"{p.time('eager')} → {p.time('tilewright')}, **{p.gain()}**" for p in cells]
        lines.append(f"| {count(length)} | {' | '.join(shown)} |")
    return "\n".join(lines)


def memory(study: Sequence[Point]) -> str:
    """Markdown: peak memory of inference and of training, both ways."""
    own = {(p.width, p.length, p.direction): p for p in study}
    widths = sorted({p.width for p in study})
    lines = [
        "| d | S | inference: written out | fused | training: written out | fused |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for width in (widths[0], widths[-1]):
        for length in sorted({p.length for p in study}):
            pair = [own[width, length, direction] for direction in MEMORY]
            cells = [p.peak(way) for p in pair for way in WAYS]
            lines.append(f"| {width} | {count(length)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def growth(sweep: Sequence[Point]) -> str:
    """Markdown: peak memory of one head over its length, and how much that is for each position."""
    own = {(p.length, p.direction): p for p in sweep}
    lines = [
        "| S | inference | bytes a position | training | bytes a position | written out, training |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for length in sorted({p.length for p in sweep}):
        cells = []
        for direction in MEMORY:
            row = own[length, direction].rows["tilewright"]
            cells += [nbytes(row.peak_bytes or 0), count((row.peak_bytes or 0) // length)]
        lines.append(f"| {count(length)} | {' | '.join(cells)} | {own[length, 'fwd+bwd'].peak('eager')} |")
    return "\n".join(lines)


def accounts(study: Sequence[Point], width: int = ACCOUNTED_WIDTH) -> str:
    """Markdown: FLOPs, bytes, predicted and measured time of both ways for one head size."""
    own = {(p.length, p.direction): p for p in study if p.width == width}
    lines = [
        "| S | direction | way | GFLOP | moved | predicted | measured |",
        "|---:|---|---|---:|---:|---:|---:|",
    ]
    profile = profile_for("h200")
    for length in sorted({length for length, _ in own}):
        operators = account(case(B=BATCH, N=length, d=width, dtype="bf16"), profile).program.operators
        for direction, graph in (("fwd", "forward"), ("bwd", "backward")):
            for way, stage in (("eager", "before"), ("tilewright", "after")):
                mine = [o for o in operators if (o.stage, o.graph) == (stage, graph)]
                flops, moved = sum(o.cost.flops for o in mine), sum(o.cost.bytes for o in mine)
                predicted = sum(o.floor_us or 0.0 for o in mine)
                cells = [f"{flops / 1e9:,.3g}", nbytes(moved), duration(predicted)]
                measured = own[length, direction].time(way)  # type: ignore[index]
                lines.append(f"| {count(length)} | {graph} | {WAYS[way]} | {' | '.join(cells)} | {measured} |")
    return "\n".join(lines)


def drawn(study: Sequence[Point]) -> Iterator[dict[str, Any]]:
    """What the plot shows: a time and a peak for each way of each point."""
    for point in study:
        for way, row in point.rows.items():
            yield {
                "S": point.length,
                "d": str(point.width),
                "direction": DIRECTIONS[point.direction],
                "way": WAYS[way],
                "µs": row.median_us,
                "MiB": (row.peak_bytes or 0) / 2**20,
            }


def draw(study: Sequence[Point], path: Path) -> None:
    """Times of each direction above, peak memory below; both axes logarithmic: a slope is an exponent."""
    import altair as alt

    values = list(drawn(study))
    dashes = alt.Legend(symbolType="stroke", symbolStrokeColor="black")

    def panel(direction: Direction, measure: str) -> alt.Chart:
        name = DIRECTIONS[direction]
        chart: alt.Chart = (
            alt.Chart(alt.InlineData(values=[v for v in values if v["direction"] == name]))
            .mark_line(point=True)
            .encode(
                x=alt.X("S:Q", scale=alt.Scale(type="log", base=2), title="S"),
                y=alt.Y(f"{measure}:Q", scale=alt.Scale(type="log"), title=measure),
                color=alt.Color("d:N", sort=None),
                strokeDash=alt.StrokeDash("way:N", sort=list(WAYS.values()), legend=dashes),
            )
            .properties(title=f"{name}: {'time' if measure == 'µs' else 'peak memory'}", width=260, height=200)
        )
        return chart

    panels = [panel(direction, "µs") for direction in DIRECTIONS]
    panels += [panel(direction, "MiB") for direction in MEMORY]
    alt.concat(*panels, columns=len(DIRECTIONS)).save(str(path), scale_factor=2)


def summary(study: Sequence[Point]) -> str:
    """The reference case, and the range of what fusing wins."""
    lines = []
    for direction, name in DIRECTIONS.items():
        own = [p for p in study if p.direction == direction and len(p.rows) == len(WAYS)]
        gains = sorted(p.rows["eager"].median_us / p.rows["tilewright"].median_us for p in own)
        here = next(p.gain() for p in own if (p.width, p.length) == (16, 4096))
        lines.append(f"- {name}: {here} at d 16, S 4096; {ratio(gains[0])} to {ratio(gains[-1])} over all sizes.")
    return "\n".join(lines)


def page(rows: Sequence[Measurement]) -> str:
    """The page that `main` writes."""
    found = points(rows)
    study, sweep = ([p for p in found if p.batch == batch] for batch in (BATCH, 1))
    where = study[0].rows["tilewright"]
    tables = "\n\n".join(times(study, direction) for direction in DIRECTIONS)
    return f"""# Attention written out against fused

{where.device}, torch {where.torch}, Triton {where.triton}, {where.date[:10]}. q, k and v are [{BATCH}, 1, S, d] in
bf16, without a mask; medians, L2 flushed before each call, every result held against float64. *Written out* is
`softmax(q kᵀ / √d) v` in eager PyTorch, *fused* is `tilewright.functional.attention`. Measured by
`tilewright bench attention --sweep study`, written by `python -m benchmarks.attention_study`.

The reference case is {REFERENCE}. Here:

{summary(study)}

![Time and peak memory over the length](attention_study.png)

## Time

{tables}

## Time is compute and memory traffic

The forward computes the same products either way; what fusing removes is the traffic of the S² scores, which are
written by one kernel and read by the next. The backward computes one product more than the one written out, to draw
the scores again instead of reading them. FLOPs and bytes are the account's, of the training step as eager runs it and
as tilewright compiles it; predicted is the sum of the floors of its kernels, each the larger of its FLOPs and its bytes
at the rates of the datasheet; measured are the functions of above. d = {ACCOUNTED_WIDTH}.

{accounts(study)}

## Peak memory

Live bytes above the inputs: of a forward without gradients, and of a forward and backward with all that is saved
between them.

{memory(study)}

### One head from a thousand to a hundred thousand positions

d 128, batch 1. What the fused way needs grows with S and not with S²: the bytes for each position stay the same.

{growth(sweep)}
"""


def main() -> None:
    rows = read_results(RESULTS)
    draw([p for p in points(rows) if p.batch == BATCH], DOCS / "attention_study.png")
    DOCS.joinpath("attention_study.md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
