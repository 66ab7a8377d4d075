"""`tilewright trace`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tilewright.cli.options import AsJson, Quiet, command_line
from tilewright.cli.output import print_json, show, stages

if TYPE_CHECKING:
    from rich.table import Table

    from tilewright.trace import Loaded


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Kineto or Chrome JSON or Perfetto's own format, also gzipped, or Nsight Systems' SQLite; one a rank."
        ),
    ],
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Load existing traces into a new run; `tilewright sql` then asks it in Perfetto's names."""
    from tilewright.trace import trace_run

    command = command_line()
    with stages(quiet or as_json) as tell:
        path, loaded = trace_run(files, command=command, tell=tell)
    if as_json:
        print_json({"run": str(path), "files": [vars(file) for file in loaded]})
        return
    if not quiet:
        show(_table(loaded))
        for file in loaded:
            if file.note:
                print(f"{file.path}: {file.note}")
        if any(file.rejects for file in loaded):
            print('rejects  tilewright sql "SELECT file, reason, count(*) FROM reject GROUP BY ALL"')
        from tilewright.report.accounting import show_accounting

        show(show_accounting(path))
    print(f"run  {path}")


def _table(loaded: Sequence[Loaded]) -> Table:
    from tilewright.report.launch_rows import plain
    from tilewright.report.tables import open_table

    counted = ("events>", "slices>", "pairs>", "flow events>", "counters>", "metadata>", "rejected>")
    table = open_table("file", "format", "rank", *counted)
    for file in loaded:
        counts = (file.events, file.slices, file.paired, file.flow_points, file.counters, file.metadata, file.rejects)
        rank = "" if file.rank is None else str(file.rank)
        table.add_row(plain(Path(file.path).name), file.format, rank, *(f"{count:,}" for count in counts))
    return table
