"""What the page shows, each part as one question to the run database."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tilewright.store import query

QUERIES: Mapping[str, str] = {
    "run": 'SELECT created::VARCHAR AS created, command, target, "case", tilewright FROM run',
    "machine": "SELECT unnest(map_entries(machine), recursive := true) FROM run",
    "dims": "SELECT unnest(map_entries(dims), recursive := true) FROM run",
    "ceilings": "SELECT device, kind, dtype, value, unit, origin FROM ceiling",
    "summary": "FROM fusion_summary",
    "speedups": """\
SELECT suite, "case", direction, impl, median_us, p20_us, p80_us, repeats,
       times_eager, times_inductor, peak_bytes, GBps, TFLOPs, of_ceiling
FROM speedup""",
    "roofline": """\
SELECT kind, graph, stage, name, operator_class, intensity, TFLOPs, GBps, flops, bytes,
       floor_us, measured_us, bound, region, provenance
FROM roofline""",
    "operators": """\
SELECT graph, stage, index, name, target, operator_class AS class, shape, shape_symbolic, dtype,
       reads, reads_symbolic, writes, writes_symbolic, unused, unused_symbolic,
       flops, flops_symbolic, bytes, intensity, floor_us, measured_us, bound, region, inputs,
       provenance, source
FROM operator
ORDER BY graph DESC, stage DESC, index""",
    "regions": """\
SELECT graph, name, members, reads, reads_symbolic, writes, writes_symbolic, flops, bytes,
       language, floor_us, bound, predicted_us, measured_us, source_code
FROM region""",
    "decisions": """\
SELECT graph, producer, consumer, verdict, reason, bytes_saved, predicted_us, measured_us,
       passed_by, source
FROM decision""",
    "memory": """\
SELECT graph, stage, index, name, live_bytes
FROM memory
ORDER BY graph DESC, stage DESC, index""",
    "peaks": """\
SELECT max(live_bytes) FILTER (WHERE stage = 'before') AS before,
       max(live_bytes) FILTER (WHERE stage = 'after') AS after
FROM memory""",
    "predicted": """\
SELECT 'region' AS what, graph || ' ' || name AS name, predicted_us, measured_us
FROM region WHERE predicted_us IS NOT NULL AND measured_us IS NOT NULL
UNION ALL
SELECT 'decision', graph || ' ' || producer || ' → ' || consumer, predicted_us, measured_us
FROM decision WHERE predicted_us IS NOT NULL AND measured_us IS NOT NULL
UNION ALL
SELECT 'whole', suite || ' ' || "case" || ' ' || direction, predicted_us, median_us
FROM measurement WHERE impl = 'tilewright' AND predicted_us IS NOT NULL""",
    "verified": """\
SELECT direction, tensor, dtype, error, eager_error, bound, max_error, eager_max_error, max_bound, ok
FROM verified
ORDER BY ok, error / nullif(bound, 0) DESC""",
    "fallbacks": 'SELECT what, "where", why FROM fallback',
}

MOST_ROWS = 4_000
MOST_SOURCE_CHARACTERS = 600_000
_LONGEST_TEXT = 240


@dataclass(frozen=True)
class Answer:
    """The first rows that a query gave; `total` counts all of them."""

    sql: str
    columns: tuple[str, ...]
    rows: list[tuple[object, ...]]
    total: int

    def records(self) -> list[dict[str, object]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def ask_all(run: Path) -> dict[str, Answer]:
    """Every question put to one run, its answers cut to what a page of a few MB can hold.

    Raises:
        StoreError: the run is missing or damaged.
    """
    return {name: _ask(run, sql) for name, sql in QUERIES.items()}


def _ask(run: Path, sql: str) -> Answer:
    columns, rows = query(run, sql)
    kept, room = [], MOST_SOURCE_CHARACTERS
    for row in rows[:MOST_ROWS]:
        cells = [_shown(value) for value in row]
        if columns[-1] == "source_code":
            code = str(row[-1])
            cells[-1] = code if len(code) <= room else None
            room -= len(code) if len(code) <= room else 0
        kept.append(tuple(cells))
    return Answer(sql, columns, kept, len(rows))


def _shown(value: object) -> object:
    """`value` as JSON holds it: text not too long, NaN and infinities as their names."""
    match value:
        case str() if len(value) > _LONGEST_TEXT:
            return value[: _LONGEST_TEXT - 1] + "…"
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
        case list():
            return [_shown(item) for item in value[:_LONGEST_TEXT]]
    return value
