"""`tilewright claims`, and `tilewright check` of a lesson."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli import completion
from tilewright.cli.options import AsJson, Device, Quiet, device_here
from tilewright.cli.output import show, stages
from tilewright.records.errors import VerificationError


def claims(
    only: Annotated[str, typer.Option(help="Claims, comma-separated, * for any: H5,V*.")] = "",
    device: Device = None,
    out: Annotated[
        Path | None, typer.Option(help="Write JSON lines; a row replaces an older row of the same claim.")
    ] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """What the reference documents claim, each checked here: reproduced or refuted, and why."""
    from collections import Counter

    from tilewright.bench.peers import example_module
    from tilewright.records.atomic_file import ensure_writable
    from tilewright.report.rows import show_rows

    check = example_module("claims/check.py")
    where = device_here(device)
    rows = []
    if out:
        ensure_writable(out, "claims")
    with stages(quiet or as_json) as tell:
        for row in check.check_claims([name for name in only.split(",") if name], device=where, tell=tell):
            rows.append(row)
            if out:
                # Written after each claim, so that an interrupted run keeps its rows.
                check.write_rows(out, [row])
            if as_json:
                print(row.as_json(), flush=True)
    if not as_json:
        table = [(row.id, row.claim, row.theirs, row.ours, row.verdict, row.why) for row in rows]
        show(show_rows(("id", "claim", "theirs", "ours", "verdict", "why"), table))
        counts = Counter(row.verdict for row in rows).most_common()
        print(", ".join(f"{count} {verdict}" for verdict, count in counts))
    if failed := [f"{row.id}: {row.ours}" for row in rows if row.verdict == "failed"]:
        raise VerificationError("\n".join(["checks that failed:", *failed]))


def check(
    lesson: Annotated[
        str, typer.Argument(help="A lesson of docs/learn: softmax, gelu, ...", autocompletion=completion.lessons)
    ],
    file: Annotated[
        Path, typer.Argument(help="Predictions, one `name = number or formula` a line; or a .py with your operator.")
    ],
    language: Annotated[
        str,
        typer.Option(
            help="en or zh: the language of what is said of predictions.", autocompletion=completion.languages
        ),
    ] = "en",
) -> None:
    """Grade your predictions or your operator in a lesson, in words."""
    from tilewright.bench.peers import example_module

    for line in example_module("lessons/check.py").check(lesson, file, language):
        print(line, flush=True)
