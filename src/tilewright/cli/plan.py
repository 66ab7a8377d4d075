"""`tilewright plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

plan = typer.Typer(
    name="plan", no_args_is_help=True, help="Export what was measured here, import it on machines of the same kind."
)


@plan.command("export")
def write(path: Annotated[Path, typer.Argument(help="The file to write.")]) -> None:
    """Outcomes of races, ceilings and kernel times of this machine, into one file."""
    from tilewright.verbs.measured_plan import export_plan

    moved = export_plan(path)
    print(f"{path}: outcomes of races: {moved.outcomes}, files of ceilings and kernel times: {moved.machines}")


@plan.command("import")
def read(path: Annotated[Path, typer.Argument(help="A file that `tilewright plan export` wrote.")]) -> None:
    """Use them here instead of measuring; what this machine measured itself stays."""
    from tilewright.verbs.measured_plan import import_plan

    moved = import_plan(path)
    print(
        f"{path}: taken over, outcomes of races: {moved.outcomes}, files of ceilings and kernel times: {moved.machines}"
    )
