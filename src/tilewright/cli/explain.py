"""`tilewright explain`."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

import typer

from tilewright.cli import completion
from tilewright.cli.options import AsJson, Inputs, Quiet, Target, Training
from tilewright.cli.output import show, working
from tilewright.hardware.profiles import profile_names
from tilewright.records.errors import UsageError


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
    """Graph, costs, floors and planned fusions; runs nothing, needs no GPU."""
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
