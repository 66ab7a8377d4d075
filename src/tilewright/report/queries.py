"""The queries of the page's parts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path

from tilewright.report.page_budget import harmless_json
from tilewright.store import query

# Parts of the template and of the page's script; if the page's size is short, the first ones get it.
WRITTEN: Mapping[str, str] = {
    "run": """\
SELECT strftime(make_timestamp(epoch_us(created)), '%Y-%m-%d %H:%M:%S UTC') AS created,
       command, target, "case", tilewright
FROM run""",
    "machine": "SELECT unnest(map_entries(machine), recursive := true) FROM run",
    "dims": "SELECT unnest(map_entries(dims), recursive := true) FROM run",
    "fallbacks": 'SELECT what, "where", why FROM fallback',
}
DRAWN: Mapping[str, str] = {
    "ceilings": "SELECT device, kind, dtype, value, unit, origin FROM ceiling",
    "summary": "FROM fusion_summary",
    "speedups": """\
SELECT suite, "case", direction, impl, median_us, p20_us, p80_us, repeats,
       times_eager, times_inductor, peak_bytes, GBps, TFLOPs, of_ceiling
FROM speedup""",
    "peaks": """\
SELECT max(live_bytes) FILTER (WHERE stage = 'before') AS before,
       max(live_bytes) FILTER (WHERE stage = 'after') AS after
FROM memory""",
    "predicted": """\
SELECT 'region' AS what, graph || ' ' || name AS name, predicted_us, measured_us
FROM region WHERE predicted_us IS NOT NULL AND measured_us IS NOT NULL
UNION ALL
SELECT 'call', graph || ' ' || name, predicted_us, measured_us
FROM operator WHERE stage = 'after' AND region IS NULL AND predicted_us IS NOT NULL AND measured_us IS NOT NULL
UNION ALL
SELECT 'decision', graph || ' ' || producer || ' → ' || consumer, predicted_us, measured_us
FROM decision WHERE predicted_us IS NOT NULL AND measured_us IS NOT NULL
UNION ALL
SELECT 'whole', suite || ' ' || "case" || ' ' || direction, predicted_us, median_us
FROM measurement WHERE impl = 'tilewright' AND predicted_us IS NOT NULL""",
    "lost": """\
SELECT name, target, graph, shape, launches, measured_us, floor_us, lost_us, share, predicted_us, off, bound, why,
       source
FROM lost_time WHERE lost_us > 0""",
    "verified": """\
SELECT direction, tensor, dtype, error, eager_error, bound, max_error, eager_max_error, max_bound, ok
FROM verified
ORDER BY ok, error / nullif(bound, 0) DESC""",
    "roofline": """\
WITH launched AS (
    SELECT count(*) > 0 AS known FROM roofline WHERE kind = 'operator' AND stage = 'after' AND region IS NULL
)
SELECT kind, graph, 'before fusion' AS shown, name, operator_class, intensity, TFLOPs, GBps, flops, floor_us,
       measured_us, bound
FROM roofline WHERE kind = 'operator' AND stage = 'before'
UNION ALL
SELECT kind, graph, 'after fusion', name, operator_class, intensity, TFLOPs, GBps, flops, floor_us, measured_us, bound
FROM roofline, launched
WHERE EXISTS (FROM roofline WHERE kind = 'region')
      AND (kind = 'region' OR (region IS NULL AND stage = CASE WHEN known THEN 'after' ELSE 'before' END))""",
    "operators": """\
SELECT graph, stage, index, name, target, operator_class AS class, shape, shape_symbolic, dtype,
       reads, reads_symbolic, writes, writes_symbolic, unused, unused_symbolic,
       flops, flops_symbolic, bytes, intensity, floor_us, predicted_us, measured_us, bound, region, inputs,
       provenance, source
FROM operator
ORDER BY graph DESC, stage DESC, index""",
    "regions": """\
SELECT graph, name, members, reads, reads_symbolic, writes, writes_symbolic, flops, bytes,
       floor_us, bound
FROM region""",
    "decisions": """\
SELECT graph, producer, consumer, verdict, reason, bytes_saved, predicted_us, measured_us,
       passed_by, source
FROM decision""",
    "memory": """\
SELECT graph, stage, index, name, live_bytes
FROM memory
ORDER BY graph DESC, stage DESC, index""",
}

SOURCES = "SELECT graph, name, language, members, source_code FROM region"

MOST_ROWS = 4_000
# Characters of the page, with markup escaped: per answer, and for all beside Vega's million.
_ROOM_OF_ONE = 1_400_000
_ROOM_OF_ALL = 3_600_000
_ROOM_OF_SOURCES = 1_200_000
_LONGEST_TEXT = 240


@dataclass(frozen=True)
class Answer:
    """The first rows of a query; `total` counts all rows."""

    sql: str
    columns: tuple[str, ...]
    rows: list[tuple[object, ...]]
    total: int

    def records(self) -> list[dict[str, object]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def ask_all(run: Path, taken: int = 0) -> dict[str, Answer]:
    """The answers of all queries on one run, cut to fit a page of 5 MB that already has `taken` characters.

    Raises:
        StoreError: the run is missing or damaged.
    """
    answers, budget = {}, _ROOM_OF_ALL - taken
    for name, sql in {**WRITTEN, **DRAWN, "kernels": SOURCES}.items():
        answers[name], used = _ask(run, sql, min(budget, _ROOM_OF_ONE))
        budget -= used
    return answers


def _ask(run: Path, sql: str, budget: int) -> tuple[Answer, int]:
    """An answer and its size. A source that does not fit is omitted, not cut."""
    columns, rows = query(run, sql)
    kept: list[tuple[object, ...]] = []
    used, sources = 0, _ROOM_OF_SOURCES
    for row in rows[:MOST_ROWS]:
        values = [shown(value) for value in row]
        if columns[-1] == "source_code":
            size = len(harmless_json(escape(str(row[-1]))))
            values[-1] = row[-1] if size <= sources else None
            sources -= size if size <= sources else 0
        used += len(harmless_json(values)) + 1
        if used > budget:
            break
        kept.append(tuple(values))
    return Answer(sql, columns, kept, len(rows)), min(used, budget)


def shown(value: object) -> object:
    """`value` for JSON: long text shortened, NaN and infinities as strings."""
    match value:
        case str() if len(value) > _LONGEST_TEXT:
            return value[: _LONGEST_TEXT - 1] + "…"
        case float() if not math.isfinite(value):
            return "NaN" if math.isnan(value) else "∞" if value > 0 else "-∞"
        case list():
            return [shown(item) for item in value[:_LONGEST_TEXT]]
    return value
