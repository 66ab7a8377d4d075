"""What reads runs: `tilewright sql`, `report`, `diff`, `whatif` and `trace`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli import completion
from tilewright.cli.options import AsJson, Quiet, RunFile, command_line
from tilewright.cli.output import print_json, show, stages
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


def report(
    run: RunFile = None,
    out: Annotated[Path | None, typer.Option(help="The file of the page; default: next to the run.")] = None,
    flame: Annotated[Path | None, typer.Option(help="Write the flame graph of the run's trace as an SVG file.")] = None,
    speedscope: Annotated[
        Path | None, typer.Option(help="Write the flame graphs of the run's trace for speedscope.app.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Write the page of the latest run, or a flame graph or Speedscope file; --out adds the page to these."""
    from tilewright.report.flame import write_flame, write_speedscope
    from tilewright.report.page import write_page
    from tilewright.store.run_paths import latest_run

    path = run or latest_run()
    written = {}
    if flame is not None:
        written["flame graph"] = write_flame(path, flame)
    if speedscope is not None:
        written["speedscope"] = write_speedscope(path, speedscope)
    if out is not None or not written:
        written["page"] = write_page(path, out or path.with_suffix(".html"))
    for what, place in written.items():
        print(place if quiet else f"{what}  {place}")


def diff(
    before: Annotated[
        Path,
        typer.Argument(help="A run, a trace, or a folder of them, of one program.", autocompletion=completion.runs),
    ],
    after: Annotated[
        Path,
        typer.Argument(
            help="What to compare it with: a run, a trace, or a folder of them.", autocompletion=completion.runs
        ),
    ],
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """What became slower or faster between two runs, whether it is real, and which operators explain it."""
    import json
    from dataclasses import asdict

    from tilewright.report.diff import show_diff
    from tilewright.trace.compare.diff import diff as compare_runs
    from tilewright.trace.compare.side import read_side

    with stages(quiet or as_json) as tell:
        found = compare_runs(*(read_side(side, tell) for side in (before, after)))
    if as_json:
        # An interval that knows no end is null: JSON has no infinity.
        print_json(json.loads(json.dumps(asdict(found), default=str), parse_constant=lambda _: None))
    else:
        show(show_diff(found))


def whatif(
    run: Annotated[Path, typer.Argument(help="A run with a timeline, as `profile` and `trace` make them.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            help="floor:OPERATOR gone:NAME host graph class:data batch:2 pinned bf16 optimizer overlap rank:1; none:"
            " all."
        ),
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """What a step would take if something were changed, and its critical path."""
    from tilewright.report.whatif import show_whatif
    from tilewright.trace.whatif.answer import what_if

    answer = what_if(run, changes or [])
    if as_json:
        print_json(asdict(answer))
    else:
        show(show_whatif(answer, path=not quiet))


_OPERATORS = 10


def trace(
    files: Annotated[
        list[Path],
        typer.Argument(
            help="Kineto or Chrome JSON, Nsight Systems' SQLite, or a memory snapshot; a folder, or an archive."
        ),
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
