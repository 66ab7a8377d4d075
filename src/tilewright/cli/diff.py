"""`tilewright diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli import completion
from tilewright.cli.options import AsJson, Quiet
from tilewright.cli.output import print_json, show, stages


def diff(
    before: Annotated[
        Path,
        typer.Argument(help="A run, a folder of runs, or a trace, of one program.", autocompletion=completion.runs),
    ],
    after: Annotated[
        Path,
        typer.Argument(
            help="What to compare it with: a run, a folder of runs, or a trace.", autocompletion=completion.runs
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
