"""`tilewright sql`."""

from __future__ import annotations

from typing import Annotated

import typer

from tilewright.cli.options import AsJson, Quiet, RunFile
from tilewright.cli.output import print_json, show
from tilewright.records.errors import UsageError


def sql(
    query: Annotated[str, typer.Argument(help="Any SQL over the run's tables; SHOW TABLES lists them.")],
    run: RunFile = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Query the latest run (read-only)."""
    from tilewright.store.query import query as ask
    from tilewright.store.run_paths import latest_run

    if not query.strip():
        raise UsageError('an empty query; `tilewright sql "SHOW TABLES"` lists the tables')
    columns, rows = ask(run or latest_run(), query)
    if as_json:
        print_json([dict(zip(columns, row, strict=True)) for row in rows])
        return
    from tilewright.report.rows import show_rows

    show(show_rows(columns, rows, header=not quiet))
