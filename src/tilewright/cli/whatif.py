"""`tilewright whatif`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.options import AsJson, Quiet
from tilewright.cli.output import print_json, show


def whatif(
    run: Annotated[Path, typer.Argument(help="A run with a timeline, as `profile` and `trace` make them.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            help="floor:OPERATOR gone:NAME host graph class:data batch:2 optimizer overlap rank:1; none: all."
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
