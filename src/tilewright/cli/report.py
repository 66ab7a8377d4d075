"""`tilewright report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.options import RunFile


def report(
    run: RunFile = None,
    out: Annotated[Path | None, typer.Option(help="Where the page goes; default: beside the run.")] = None,
) -> None:
    """Write the page of the latest run."""
    from tilewright.report.page import write_page
    from tilewright.store.places import latest_run

    path = run or latest_run()
    print(f"page  {write_page(path, out or path.with_suffix('.html'))}")
