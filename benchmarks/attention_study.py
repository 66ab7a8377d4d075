"""Writes docs/attention_study.md and .png, attention written out against fused: `python -m benchmarks.attention_study`.

The rows are measured by

    tilewright bench attention --sweep study --impl tilewright,eager --seconds 0.2 --device cuda --out FILE
    tilewright bench attention --sweep memory --impl tilewright,eager --direction fwd,fwd+bwd --seconds 0.2 \
        --device cuda --out FILE

where FILE is benchmarks/results/h200/attention.jsonl; FLOPs, bytes and predictions are the account's, at the rates
measured on an H200.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.attention import case
from tilewright.bench.suites.attention import MOST_SCORES
from tilewright.compile.price import price_case
from tilewright.hardware.profiles import DeviceProfile, profile_for
from tilewright.hardware.target import absent
from tilewright.measure.racing.results import read_results
from tilewright.records.measurement import Direction, Measurement
from tilewright.records.program import Operator
from tilewright.report.quantity import count, duration, nbytes, ratio

RESULTS = Path(__file__).parent / "results" / "h200" / "attention.jsonl"
DOCS = Path(__file__).parents[1] / "docs"
CASE = re.compile(r"d(\d+) S(\d+) full B(\d+) H1")
BATCH = 8
"""Batch of the study; the rows of the memory sweep have a batch of one."""
ACCOUNTED_WIDTH = 64
WAYS = {"eager": "written out", "tilewright": "fused"}
DIRECTIONS: dict[Direction, str] = {"fwd": "Forward, inference", "bwd": "Backward", "fwd+bwd": "Training step"}
MEMORY: tuple[Direction, Direction] = ("fwd", "fwd+bwd")
"""Inference and training; the memory of a backward alone leaves out what is saved for it."""
REFERENCE = (16, 4096)
"""Head size and length at which the study's source found 2.4 times the speed, forward and backward."""
EXPONENTIALS = 16
"""That a multiprocessor computes in a cycle."""
CLOCK_GHZ = 1.98


@dataclass(frozen=True)
class Point:
    """One size of the study, both ways; a way that the bench refused has no row."""

    width: int
    length: int
    batch: int
    direction: Direction
    rows: dict[str, Measurement]

    def gain(self) -> float | None:
        """How many times as fast the fused way is."""
        if len(self.rows) < len(WAYS):
            return None
        return self.rows["eager"].median_us / self.rows["tilewright"].median_us

    def time(self, way: str) -> str:
        """The median of a way."""
        return duration(self.rows[way].median_us) if way in self.rows else self._missing()

    def peak(self, way: str) -> str:
        """The peak memory of a way."""
        return nbytes(self.rows[way].peak_bytes or 0) if way in self.rows else self._missing()

    def _missing(self) -> str:
        return "too large" if self.batch * self.length**2 > MOST_SCORES else "–"


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
        f"<!-- table: study {re.sub(r'[^a-z]+', ' ', direction)} -->",
        f"| S | {' | '.join(f'd {width}' for width in widths)} |",
        f"|---:|{'---:|' * len(widths)}",
    ]
    for length in lengths:
        cells = [own[width, length] for width in widths]
        gains = [p.gain() for p in cells]
        won = ["" if gain is None else f", **{ratio(gain)}**" for gain in gains]
        shown = [f"{p.time('eager')} → {p.time('tilewright')}{gain}" for p, gain in zip(cells, won, strict=True)]
        lines.append(f"| {count(length)} | {' | '.join(shown)} |")
    return "\n".join([*lines, "<!-- /table -->"])


def memory(study: Sequence[Point]) -> str:
    """Markdown: peak memory of inference and of training, both ways."""
    own = {(p.width, p.length, p.direction): p for p in study}
    widths = sorted({p.width for p in study})
    lines = [
        "<!-- table: study memory -->",
        "| d | S | inference: written out | fused | training: written out | fused |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for width in (widths[0], widths[-1]):
        for length in sorted({p.length for p in study}):
            pair = [own[width, length, direction] for direction in MEMORY]
            cells = [p.peak(way) for p in pair for way in WAYS]
            lines.append(f"| {width} | {count(length)} | {' | '.join(cells)} |")
    return "\n".join([*lines, "<!-- /table -->"])


def growth(sweep: Sequence[Point]) -> str:
    """Markdown: peak memory of one head over its length, and how much that is for each position."""
    own = {(p.length, p.direction): p for p in sweep}
    lines = [
        "<!-- table: study growth -->",
        "| S | inference | bytes a position | training | bytes a position | written out, training |",
        "|---:|---:|---:|---:|---:|---:|",
    ]
    for length in sorted({p.length for p in sweep}):
        cells = []
        for direction in MEMORY:
            row = own[length, direction].rows["tilewright"]
            cells += [nbytes(row.peak_bytes or 0), count((row.peak_bytes or 0) // length)]
        lines.append(f"| {count(length)} | {' | '.join(cells)} | {own[length, 'fwd+bwd'].peak('eager')} |")
    return "\n".join([*lines, "<!-- /table -->"])


@dataclass(frozen=True)
class Bill:
    """The work of the kernels of one way and direction, and its time at an H200's rates."""

    flops: int
    """FLOPs of matrix products."""
    moved: int
    products_us: float
    memory_us: float
    predicted_us: float
    bound: str
    """The bound of the longest kernel."""


def bill(operators: Sequence[Operator], profile: DeviceProfile) -> Bill:
    """The bill of operators that run one after another."""
    flops = sum(o.cost.flops for o in operators if o.operator_class == "compute")
    moved = sum(o.cost.bytes for o in operators)
    longest = max(operators, key=lambda o: o.floor_us or 0.0)
    return Bill(
        flops=flops,
        moved=moved,
        products_us=flops / profile.matmul_TFLOPs["bfloat16"] / 1e6,
        memory_us=moved / profile.copy_GBps / 1e3,
        predicted_us=sum(o.floor_us or 0.0 for o in operators),
        bound=longest.bound or "",
    )


def bills(length: int, width: int = ACCOUNTED_WIDTH) -> dict[tuple[Direction, str], Bill]:
    """By direction and way. Of the compiled program attention alone, which is what is measured."""
    profile = profile_for("h200")
    operators = price_case(case(B=BATCH, N=length, d=width, dtype="bf16"), absent(profile)).program.operators
    found: dict[tuple[Direction, str], Bill] = {}
    graphs: dict[Direction, str] = {"fwd": "forward", "bwd": "backward"}
    for direction, graph in graphs.items():
        before = [o for o in operators if (o.stage, o.graph) == ("before", graph)]
        after = [o for o in operators if (o.stage, o.graph) == ("after", graph) and "attention" in o.name]
        found[direction, "eager"], found[direction, "tilewright"] = bill(before, profile), bill(after, profile)
    return found


def accounts(study: Sequence[Point], width: int = ACCOUNTED_WIDTH) -> str:
    """Markdown: FLOPs, bytes, what they take, and predicted and measured time of both ways for one head size."""
    own = {(p.length, p.direction): p for p in study if p.width == width}
    lines = [
        "<!-- table: study accounts -->",
        "| S | | way | GFLOP | moved | products | memory | predicted | measured | limited by |",
        "|---:|---|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for length in sorted({length for length, _ in own}):
        for (direction, way), one in bills(length, width).items():
            flops = one.flops / 1e9
            cells = [f"{flops:,.0f}" if flops >= 100 else f"{flops:.3g}", nbytes(one.moved)]
            cells += [duration(us) for us in (one.products_us, one.memory_us, one.predicted_us)]
            cells += [own[length, direction].time(way), one.bound.removesuffix("-bound")]
            name = "forward" if direction == "fwd" else "backward"
            lines.append(f"| {count(length)} | {name} | {WAYS[way]} | {' | '.join(cells)} |")
    return "\n".join([*lines, "<!-- /table -->"])


def exponentials_us(length: int) -> float:
    """The least time of a forward's exponentials, one for each score."""
    rate = profile_for("h200").sms * EXPONENTIALS * CLOCK_GHZ * 1e3
    return BATCH * length**2 / rate


def drawn(study: Sequence[Point]) -> Iterator[dict[str, Any]]:
    """The rows of the plot: a time and a peak for each way of each point."""
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
    lengths = sorted({point.length for point in study})

    def panel(direction: Direction, measure: str) -> alt.LayerChart | alt.FacetChart:
        name = DIRECTIONS[direction]
        base = alt.Chart(alt.InlineData(values=[v for v in values if v["direction"] == name])).encode(
            x=alt.X("S:Q", scale=alt.Scale(type="log", base=2), axis=alt.Axis(values=lengths, labelAngle=-40)),
            y=alt.Y(f"{measure}:Q", scale=alt.Scale(type="log"), axis=alt.Axis(tickCount=5)),
            color=alt.Color("d:N", sort=None),
        )
        lines = base.mark_line().encode(strokeDash=alt.StrokeDash("way:N", sort=list(WAYS.values())))
        return alt.layer(lines, base.mark_point(filled=True)).properties(
            title=f"{name}: {'time' if measure == 'µs' else 'peak memory'}", width=260, height=200
        )

    panels = [panel(direction, "µs") for direction in DIRECTIONS]
    panels += [panel(direction, "MiB") for direction in MEMORY]
    alt.concat(*panels, columns=len(DIRECTIONS)).save(str(path), scale_factor=2)


def summary(study: Sequence[Point]) -> str:
    """The reference case, and the range of what fusing wins."""
    width, length = REFERENCE
    lines = []
    for direction, name in DIRECTIONS.items():
        own = {(p.width, p.length): gain for p in study if p.direction == direction and (gain := p.gain()) is not None}
        low, high = min(own.values()), max(own.values())
        here = ratio(own[REFERENCE])
        lines.append(f"- {name}: {here} at d {width}, S {length}; {ratio(low)} to {ratio(high)} over all sizes.")
    return "\n".join(lines)


def saved(study: Sequence[Point]) -> str:
    """How much less memory the fused way needs at the reference case, in inference and in training."""
    width, length = REFERENCE
    own = {p.direction: p for p in study if (p.width, p.length) == (width, length)}
    shares = []
    for direction in MEMORY:
        peaks = [own[direction].rows[way].peak_bytes or 0 for way in WAYS]
        shares.append(f"{nbytes(peaks[0])} → {nbytes(peaks[1])} ({peaks[1] / peaks[0]:.1%})")
    return f"at d {width}, S {length}: inference {shares[0]}, training {shares[1]}"


def page(rows: Sequence[Measurement]) -> str:
    """The page that `main` writes."""
    found = points(rows)
    study, sweep = ([p for p in found if p.batch == batch] for batch in (BATCH, 1))
    where = study[0].rows["tilewright"]
    tables = "\n\n".join(times(study, direction) for direction in DIRECTIONS)
    width, length = REFERENCE
    profile, forward = profile_for("h200"), bills(length)
    before, after = forward["fwd", "eager"], forward["fwd", "tilewright"]
    made = f"{where.device}, torch {where.torch}, Triton {where.triton}, {where.date[:10]}"
    traffic = f"{duration(before.memory_us)} to {duration(after.memory_us)}"
    longest = max(p.length for p in study)
    exponentials = duration(exponentials_us(longest))

    def spread(way: str) -> str:
        errors = [p.rows[way].error or 0.0 for p in study if way in p.rows and p.direction == "fwd"]
        return f"{min(errors):.1e} to {max(errors):.1e}"

    return f"""# Attention written out against fused

{made}. q, k and v are [{BATCH}, 1, S, d] in bf16,
without a mask; medians, L2 flushed before each call, every result held against float64. *Written out* is
`softmax(q kᵀ / √d) v` in eager PyTorch, *fused* is `tilewright.functional.attention`. Measured by
`tilewright bench attention --sweep study`, written by `python -m benchmarks.attention_study`.

The reference case is d {width}, S {length}: 2.4 times as fast, forward and backward. Here:

{summary(study)}

![Time and peak memory over the length](attention_study.png)

## Time

Written out → fused, and how many times as fast. `–`: the bench refused the way written out. It rounds scores and
weights to bf16 (relative error {spread("eager")}, fused {spread("tilewright")}), and there one element
was further off than twice what PyTorch's fused operator is, which the bench holds all ways against.

{tables}

What limits it:

- **Written out**, from S {count(1024)} on: memory. The S² scores are all that counts, so times do not depend on d.
- **Fused, forward**: the matrix units, and the exponentials, of which there are as many whatever d is. At S
  {count(longest)} they take {exponentials} by themselves, as long as the products of d 64 would at the peak of the
  matrix units. Head sizes 16 and 32 are padded to 64, so all three take the same time.
- **Fused, backward**: the additions to dq in L2, then the matrix units. At d 256 there is least to win: the products
  grow with d, and the traffic that fusing saves does not.
- **S 256**: launches, and too few programs for {profile.sms} multiprocessors (two for each of {BATCH} heads). The fused
  backward is three kernels; at d 256, where a program has most to do, written out is faster.

## Time is compute and memory traffic

The products of the forward are the same either way. What fusing removes is the traffic of the S² scores, which one
kernel writes and the next reads: at S {length}, d {ACCOUNTED_WIDTH}, the products take {duration(before.products_us)}
in both, and what memory takes goes from {traffic}. The backward computes one product more
than the one written out, to draw the scores again instead of reading them. FLOPs (of products) and bytes are the
account's; products and memory are what they take at the rates measured on an H200, memory at that of DRAM; predicted
is the sum over the kernels of whichever is longer, without the exponentials, and with the rate of L2 for what fits in
it; limited by: what the longest kernel is. d = {ACCOUNTED_WIDTH}.

{accounts(study)}

## Peak memory

Live bytes above the inputs: of a forward without gradients, and of a forward and backward with all that is saved
between them. Fused, neither keeps anything of the size S²:
{saved(study)}.
A fused forward whose backward reads the scores from memory saves in inference alone.

{memory(study)}

### One head from a thousand to a hundred thousand positions

d 128, batch 1. What the fused way needs grows with S and not with S²: the bytes for each position stay the same. Those
of training have the gradient that comes in among them. Too large: more than 2³¹ scores, of which training keeps several
copies.

{growth(sweep)}
"""


def main() -> None:
    rows = read_results(RESULTS)
    draw([p for p in points(rows) if p.batch == BATCH], DOCS / "attention_study.png")
    DOCS.joinpath("attention_study.md").write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
