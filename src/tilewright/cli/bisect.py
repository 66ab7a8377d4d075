"""`tilewright bisect`."""

from __future__ import annotations

import json

from tilewright.cli.options import AsJson, Device, Inputs, Quiet, Target, Training, device_here
from tilewright.cli.output import stages
from tilewright.records.errors import VerificationError


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
