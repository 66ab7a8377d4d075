"""`tilewright optimize`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from tilewright.cli.options import (
    AsJson,
    Device,
    Inputs,
    Quiet,
    Target,
    Training,
    command_line,
    device_here,
    time_given,
)
from tilewright.cli.output import show, stages
from tilewright.records.errors import VerificationError
from tilewright.verbs.optimisation import TOP


def optimize(
    target: Target,
    inputs: Inputs = None,
    training: Training = None,
    device: Device = None,
    seconds: Annotated[float, typer.Option(help="Seconds to measure.", callback=time_given)] = 20.0,
    top: Annotated[
        int, typer.Option(help="How many launches to show, those that lose most time to their floors first.", min=0)
    ] = TOP,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Capture, explain, fuse, verify, measure; writes a run and a page."""
    from tilewright.case_names import load_case
    from tilewright.report.terminal import as_json as program_json
    from tilewright.verbs import optimize_case

    where = device_here(device)
    case = load_case(target, inputs, training=training)
    with stages(quiet or as_json) as tell:
        done = optimize_case(case, command=command_line(), device=where, seconds=seconds, tell=tell)
    done = replace(done, top=top)
    if as_json:
        print(program_json(done.program, (), done.measurements, done.verified, done.lost_time(), done.run))
    else:
        show(done)
    broken = [v.tensor for v in done.verified if not v.ok]
    if broken:
        raise VerificationError(f"the numbers contract is broken for {', '.join(broken)}; see the run {done.run}")
