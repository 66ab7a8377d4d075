"""`sql` and `diff` as functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tilewright.report.displayable import Displayable

if TYPE_CHECKING:
    from tilewright.trace.compare.diff import Difference


@dataclass(frozen=True, repr=False)
class Rows(Displayable):
    """The result of a query: its columns and rows; iterates over the rows, and shows itself."""

    columns: Sequence[str]
    rows: Sequence[tuple[object, ...]]

    def __iter__(self) -> Iterator[tuple[object, ...]]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __rich__(self) -> Any:
        from tilewright.report.rows import show_rows

        return show_rows(self.columns, self.rows)


@dataclass(frozen=True, repr=False)
class Compared(Displayable):
    """What changed between two runs; shows itself."""

    difference: Difference

    def __rich__(self) -> Any:
        from tilewright.report.diff import show_diff

        return show_diff(self.difference)


def sql(query: str, run: Path | str | None = None) -> Rows:
    """What `query` gives on a run, by default the latest, which it cannot change; `SHOW TABLES` lists its tables.

    Raises StoreError if there is no run, or DuckDB refuses the query.
    """
    from tilewright.store.query import query as ask
    from tilewright.store.run_paths import latest_run

    return Rows(*ask(Path(run) if run is not None else latest_run(), query))


def diff(before: Path | str, after: Path | str) -> Compared:
    """What became slower or faster from one run, folder of runs, or trace to another, and which operators explain it.

    Raises StoreError or TraceError if either cannot be read or has no steps.
    """
    from tilewright.trace.compare.diff import diff as compare_runs
    from tilewright.trace.compare.side import read_side

    first, second = (read_side(Path(side), lambda _: None) for side in (before, after))
    return Compared(compare_runs(first, second))
