"""`tilewright diff`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.options import AsJson
from tilewright.cli.output import print_json, show


def diff(
    before: Annotated[Path, typer.Argument(help="A run, or a folder of runs of the same program.")],
    after: Annotated[Path, typer.Argument(help="A run, or a folder of runs, to hold against it.")],
    as_json: AsJson = False,
) -> None:
    """What became slower or faster between two runs, whether it is real, and which operators explain it."""
    import json
    from dataclasses import asdict

    from tilewright.report.diff import show_diff
    from tilewright.trace.compare.diff import diff as compare_runs
    from tilewright.trace.compare.diff import read_run, runs_of

    found = compare_runs(*([read_run(path) for path in runs_of(side)] for side in (before, after)))
    if as_json:
        # An interval that knows no end is null: JSON has no infinity.
        print_json(json.loads(json.dumps(asdict(found), default=str), parse_constant=lambda _: None))
    else:
        show(show_diff(found))
