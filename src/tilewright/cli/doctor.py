"""`tilewright doctor`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from tilewright.cli.options import AsJson, Quiet
from tilewright.cli.output import print_json, stages, working


def doctor(
    refresh: Annotated[bool, typer.Option("--refresh", help="Measure the ceilings again.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:N; default: the first GPU, if any.")] = None,
    kernels: Annotated[
        bool,
        typer.Option("--kernels", help="Time kernels of every kind and fit the prediction of kernel times to them."),
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Write the report to this file, as JSON.")] = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show the machine and its ceilings: the highest rates that it reaches, measured and from the datasheet."""
    from tilewright.hardware.profiles import local_ceilings
    from tilewright.hardware.summary import machine_record, machine_report
    from tilewright.records.atomic_file import ensure_writable, write_document

    if out:
        ensure_writable(out, "report")
    with working("measuring ceilings", quiet or as_json):
        machine, ceilings = local_ceilings(refresh, device)
    with working("building the executor of compiled programs", quiet or as_json):
        _build_executor()
    record = machine_record(machine, ceilings)
    fitted = _fit(device, quiet or as_json) if kernels else []
    if kernels:
        record["kernels"] = fitted
    if out:
        write_document(out, json.dumps(record, indent=1, ensure_ascii=False) + "\n", "report")
    if as_json:
        print_json(record)
        return
    report = machine_report(machine, ceilings)
    width = max(len(label) for label, _ in report)
    for label, value in report:
        print(f"{label:<{width}}  {value}")
    if kernels:
        print(f"\n{'kernels':<28}  timed  median error  95th percentile")
        for row in fitted:
            print(f"{row['kind']:<28}  {row['timed']:>5}  {row['median_error']:>12.1%}  {row['p95_error']:>15.1%}")


def _build_executor() -> None:
    """Build it before a program needs it. Where it cannot be built, a line says why."""
    from tilewright.launch.executor import EXTENSION

    EXTENSION.module()
    EXTENSION.wait()


def _fit(device: str | None, quiet: bool) -> list[dict[str, Any]]:
    """Time, fit and keep; for each kind how many kernels were timed, and the errors of their predicted times."""
    from tilewright.verbs.calibration import calibrate

    with stages(quiet) as tell:
        fitted = calibrate(device, tell)
    return [
        {"kind": kind, "timed": count, "median_error": middle, "p95_error": most}
        for kind, (count, middle, most) in fitted.items()
    ]
