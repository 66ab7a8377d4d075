"""`tilewright trace`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.options import AsJson, Quiet, command_line
from tilewright.cli.output import print_json, show, stages

_OPERATORS = 10


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(help="Kineto or Chrome JSON, also gzipped, or Nsight Systems' SQLite; one file per rank."),
    ],
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Load existing traces into a new run, which `tilewright sql` queries with Perfetto's names."""
    from tilewright.trace import trace_run

    command = command_line()
    with stages(quiet or as_json) as tell:
        path, loaded = trace_run(files, command=command, tell=tell)
    if as_json:
        from tilewright.report.verdict import verdict_words

        print_json({"run": str(path), "verdict": verdict_words(path), "files": [vars(file) for file in loaded]})
        return
    if not quiet:
        from tilewright.report.accounting import show_accounting
        from tilewright.report.profile import show_operators
        from tilewright.report.queries import ask_view
        from tilewright.report.rows import show_view
        from tilewright.report.verdict import show_verdict
        from tilewright.report.views import LOADED

        show(show_verdict(path))
        show(show_view(LOADED, ask_view(path, LOADED, len(files)), len(files)))
        if any(file.rejects for file in loaded):
            print('rejects  tilewright sql "SELECT file, reason, count(*) FROM reject GROUP BY ALL"')
        for table in show_operators(path, _OPERATORS):
            show(table)
        show(show_accounting(path))
    print(f"run  {path}")
