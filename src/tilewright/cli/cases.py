"""The verbs of a case: `tilewright explain`, `optimize` and `bisect`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from tilewright.cli import completion
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
from tilewright.cli.output import show, stages, working
from tilewright.hardware.profiles import profile_names
from tilewright.records.errors import UsageError, VerificationError
from tilewright.verbs.optimisation import TOP


def explain(
    target: Target,
    inputs: Inputs = None,
    on: Annotated[
        str | None,
        typer.Option(help=f"{', '.join(profile_names())}; default: this machine.", autocompletion=completion.devices),
    ] = None,
    training: Training = None,
    tree: Annotated[bool, typer.Option("--tree", help="The graph as an annotated tree instead of tables.")] = False,
    passes: Annotated[bool, typer.Option("--passes", help="What each rewrite did to the graph.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="Every operator, region and decision.")] = False,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Show graph, costs, floors (least times) and planned fusions; runs nothing, needs no GPU."""
    from tilewright.case_names import load_case
    from tilewright.verbs import explain_case, tree_of_case
    from tilewright.verbs.explanation import rewrite_lines, rewrites_of_case

    case = load_case(target, inputs, training=training)
    if tree:
        if as_json:
            raise UsageError("--tree is for reading; leave --json or --tree out")
        show(tree_of_case(case))
        return
    if passes:
        if as_json:
            raise UsageError("--passes is for reading; leave --json or --passes out")
        with working("capturing", quiet):
            rewrites = rewrites_of_case(case, on)
        print("\n".join(rewrite_lines(rewrites, everything)))
        return
    with working("capturing", quiet or as_json):
        explanation = explain_case(case, on)
    if as_json:
        from tilewright.report.terminal import as_json as program_json

        print(program_json(explanation.program, explanation.ceilings))
    else:
        show(replace(explanation, everything=everything))


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
    """Capture, explain, fuse, verify and measure a model; writes a run and a page."""
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


def bisect(
    target: Target,
    inputs: Inputs = None,
    training: Training = None,
    device: Device = None,
    as_json: AsJson = False,
    quiet: Quiet = False,
) -> None:
    """Which rewrite of the graph makes a number wrong, and at which line of the model."""
    from tilewright.case_names import load_case
    from tilewright.verbs.bisection import bisect_case

    where = device_here(device)
    case = load_case(target, inputs, training=training)
    with stages(quiet or as_json) as tell:
        found = bisect_case(case, where, tell)
    if as_json:
        row = {"rewrite": found.rewrite, "node": found.node, "source": found.source, "changes": [*found.changes]}
        print(json.dumps({"outcome": found.outcome, **row, "broken": [v.tensor for v in found.broken]}, indent=1))
    else:
        print(found.outcome)
        print("\n".join(f"  {line}" for line in found.changes))
    if found.broken:
        advice = "" if found.rewrite is None else f"leave it out with TILEWRIGHT_SKIP={found.rewrite}, and "
        raise VerificationError(f"{advice}please report it")
