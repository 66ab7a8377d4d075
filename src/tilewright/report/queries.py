"""The queries of the page's parts that are no tables, and the answers to all of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING

from tilewright.records.errors import first_line
from tilewright.report.page_budget import fitting, harmless_json
from tilewright.report.views import PROGRAM, TRACE, View
from tilewright.store import query

if TYPE_CHECKING:
    from duckdb import DuckDBPyConnection

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
    "summary": "FROM fusion_summary",
    "peaks": """\
SELECT max(live_bytes) FILTER (WHERE stage = 'before') AS before,
       max(live_bytes) FILTER (WHERE stage = 'after') AS after
FROM memory""",
    "roofline": """\
SELECT kind, graph, stage || ' fusion' AS shown, name, operator_class, intensity, TFLOPs, GBps, flops, floor_us,
       measured_us, bound
FROM roofline ORDER BY stage DESC""",
    "operators": """\
SELECT graph, stage, index, name, target, operator_class AS class, shape, shape_symbolic, dtype,
       reads, reads_symbolic, writes, writes_symbolic, unused, unused_symbolic,
       flops, flops_symbolic, bytes, intensity, floor_us, predicted_us, measured_us, bound, region, inputs,
       provenance, source
FROM operator
ORDER BY graph DESC, stage DESC, index""",
    "memory": """\
SELECT graph, stage, index, name, live_bytes
FROM memory
ORDER BY graph DESC, stage DESC, index""",
}

SOURCES = "SELECT graph, name, language, members, schedule, source_code FROM region"

MOST_ROWS = 4_000
# Characters of the page, with markup escaped: per answer, and for all beside Vega's million.
_ROOM_OF_ONE = 1_400_000
_ROOM_OF_ALL = 3_600_000
_ROOM_OF_SOURCES = 1_200_000
_LONGEST_TEXT = 240
# Limits of a table of the timeline.
_MOST_TRACED = 500
_ROOM_OF_TRACED = 100_000


@dataclass(frozen=True)
class Answer:
    """The first rows of a query; `total` counts all rows."""

    sql: str
    columns: tuple[str, ...]
    rows: list[tuple[object, ...]]
    total: int
    problem: str = ""

    def records(self) -> list[dict[str, object]]:
        return [dict(zip(self.columns, row, strict=True)) for row in self.rows]


def ask_all(run: Path, taken: int = 0) -> dict[str, Answer]:
    """The answers of all queries on one run, cut to fit a page of 5 MB that already has `taken` characters.

    Raises:
        StoreError: the run is missing or damaged.
    """
    answers, budget = {}, _ROOM_OF_ALL - taken
    for name, sql in {**WRITTEN, **DRAWN, **{view.id: view.sql for view in PROGRAM}, "kernels": SOURCES}.items():
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


def ask_view(run: Path, view: View, most: int) -> Answer:
    """The first `most` rows of a view; StoreError if the run is missing or damaged."""
    columns, rows = query(run, f"{view.sql} LIMIT {most}")
    return Answer(view.sql, columns, rows, len(rows))


def ask_traced(connection: DuckDBPyConnection) -> dict[str, Answer]:
    """The answers of a timeline's tables that have any, by their id, each with at most 500 rows and 100 kB.

    A run of another version may lack a view, or have one with other columns: `problem` says so.
    """
    import duckdb

    answers = {}
    for view in TRACE:
        try:
            cursor = connection.execute(view.sql)
            columns, rows = tuple(str(column[0]) for column in cursor.description or ()), cursor.fetchall()
        except (duckdb.BinderException, duckdb.CatalogException) as error:
            problem = f"This run was written by another version of tilewright. {first_line(error)}"
            answers[view.id] = Answer(view.sql, (), [], 0, problem)
            continue
        kept = fitting((tuple(map(shown, row)) for row in rows[:_MOST_TRACED]), _ROOM_OF_TRACED)
        answers[view.id] = Answer(view.sql, columns, kept, len(rows))
    return {name: answer for name, answer in answers.items() if answer.total or answer.problem}


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
