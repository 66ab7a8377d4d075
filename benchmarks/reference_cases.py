"""Writes docs/reference_cases.md from the result files: `python -m benchmarks.reference_cases [DIR]`.

Three small cases that show what limits a kernel, each with all its implementations. They are measured by

    tilewright bench softmax --shapes 100x5000 --dtype fp32 --direction fwd --device cuda --out DIR/softmax.jsonl
    tilewright bench gelu --shapes 16384x16384 --dtype fp32 --direction fwd --device cuda --out DIR/gelu.jsonl
    tilewright bench weighted_sum --shapes 1000x512 --dtype fp32 --direction fwd --device cuda --out …
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tilewright.bench.catalogue import suite
from tilewright.measure.racing.results import read_results
from tilewright.records.measurement import Measurement
from tilewright.report.quantity import duration, nbytes, ratio

RESULTS = Path(__file__).parent / "results" / "h200"
DOCS = Path(__file__).parents[1] / "docs"


@dataclass(frozen=True)
class Reference:
    """One case: the suite, its name in the result files, and what it shows."""

    suite: str
    case: str
    lesson: str


CASES = (
    Reference(
        "softmax",
        "100x5000 fp32",
        "Two megabytes in, two out: a microsecond of memory traffic. Eager takes five launches, a Python loop over "
        "columns thirty-five thousand; a fused kernel takes one launch and two memory latencies.",
    ),
    Reference(
        "gelu",
        "16384x16384 fp32",
        "One gibibyte in, one out, and a few dozen instructions per element: every implementation that reads and "
        "writes memory once has the speed of a copy; each separate operator adds a read and a write.",
    ),
    Reference(
        "weighted_sum",
        "1000x512 fp32",
        "Two megabytes read once. Tiles of 16 × 64 give 63 programs for 132 multiprocessors, each with 8 tiles in "
        "sequence: latency, not bandwidth, is the limit.",
    ),
)


def table(reference: Reference, rows: Sequence[Measurement]) -> str:
    """Markdown: the implementations of one case, fastest first, and what limits each."""
    notes = {variant.name: variant.note for variant in suite(reference.suite).variants}
    measured = [r for r in rows if (r.suite, r.case, r.direction) == (reference.suite, reference.case, "fwd")]
    if not measured:
        raise SystemExit(f"no row of {reference.suite} {reference.case}; see the commands in {__file__}")
    eager = next(row for row in measured if row.impl == "eager")
    lines = [
        f"## {reference.suite} {reference.case}\n\n{suite(reference.suite).summary}. {reference.lesson}\n",
        f"<!-- table: reference {reference.suite.replace('_', ' ')} -->",
        "| impl | time | × eager | GB/s | of limit | peak memory | error | what limits it |",
        "|---|---:|---:|---:|---:|---:|---:|---|",
    ]
    for row in sorted(measured, key=lambda row: row.median_us):
        figures = [
            row.impl,
            duration(row.median_us),
            ratio(eager.median_us / row.median_us),
            f"{GBps:,.0f}" if (GBps := row.GBps or 0.0) >= 100 else f"{GBps:.3g}",
            f"{row.of_ceiling or 0:.0%}",
            nbytes(row.peak_bytes or 0),
            "-" if row.error is None else f"{row.error:.1e}",
            notes.get(row.impl, ""),
        ]
        lines.append(f"| {' | '.join(figures)} |")
    where = measured[0]
    lines.append(f"<!-- /table -->\n\n{where.device}, torch {where.torch}, {where.date[:10]}.")
    return "\n".join(lines)


def main(folder: Path) -> None:
    tables = [table(case, read_results(folder / f"{case.suite}.jsonl")) for case in CASES]
    text = "# Reference cases\n\nMeasured and verified by `tilewright bench`, forward, L2 flushed before each call.\n\n"
    DOCS.joinpath("reference_cases.md").write_text(text + "\n\n".join(tables) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS)
