"""`tilewright doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from tilewright.cli.options import AsJson, Quiet
from tilewright.cli.output import print_json, working


def doctor(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure the ceilings again.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: the first GPU, if any.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the report to this file, as JSON.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """The machine, its ceilings measured and from the datasheet."""
    from tilewright.hardware.profiles import local_ceilings
    from tilewright.hardware.summary import machine_record, machine_report

    with working("measuring ceilings", quiet or as_json):
        machine, ceilings = local_ceilings(refresh, device)
    record = machine_record(machine, ceilings)
    if out:
        from tilewright.records.atomic_file import write_atomically

        out.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(out, json.dumps(record, indent=1, ensure_ascii=False) + "\n", mode=0o644)
    if as_json:
        print_json(record)
        return
    report = machine_report(machine, ceilings)
    width = max(len(label) for label, _ in report)
    for label, value in report:
        print(f"{label:<{width}}  {value}")
