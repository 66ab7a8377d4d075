"""Whether a row was measured from today's sources, and the mark of one that was not."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from tilewright.bench.catalogue import SUITES, suite
from tilewright.measure.racing.results import sources_of_programs
from tilewright.records.measurement import Measurement
from tilewright.records.sources import digest

MARK, NO_MARK = " †", "\0"
FOOTNOTE = "\n†: measured before the last change of its sources.\n"
ALL = "\ntilewright's figures in this table are older than its kernels, whose sources have changed since (†).\n"


@functools.cache
def _sources(name: str, impl: str) -> Sequence[str]:
    return suite(name).sources_of(impl) if name in SUITES else sources_of_programs(impl)


def is_todays(row: Measurement) -> bool:
    """Whether the sources that the row measured are those of this tree; always so for others' implementations."""
    sources = _sources(row.suite, row.impl)
    return not sources or row.sources == digest(*sources)


def mark(rows: Iterable[Measurement]) -> str:
    """The mark of a figure that comes from these rows. Figures of others have none, those of today's `NO_MARK`."""
    ours = [row for row in rows if _sources(row.suite, row.impl)]
    return (NO_MARK if all(map(is_todays, ours)) else MARK) if ours else ""


def with_footnote(table: str) -> str:
    """The table, and below it what the mark says where a figure has it. If all have it, one sentence says so."""
    if MARK in table and NO_MARK not in table:
        return table.replace(MARK, "") + ALL
    return table.replace(NO_MARK, "") + (FOOTNOTE if MARK in table else "")
