"""`tilewright report`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.options import Quiet, RunFile


def report(
    run: RunFile = None,
    out: Annotated[Path | None, typer.Option(help="The file of the page; default: next to the run.")] = None,
    flame: Annotated[Path | None, typer.Option(help="Write the flame graph of the run's trace as an SVG file.")] = None,
    speedscope: Annotated[
        Path | None, typer.Option(help="Write the flame graphs of the run's trace for speedscope.app.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Write the page of the latest run; with --flame or --speedscope those, and the page only if --out names one."""
    from tilewright.report.flame_svg import write_flame
    from tilewright.report.page import write_page
    from tilewright.report.speedscope import write_speedscope
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
