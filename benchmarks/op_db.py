"""Runs PyTorch's own database of operators through the backend in many processes, strict, on a CPU or a GPU.

    python -m benchmarks.op_db --device cuda --dtypes float32,bfloat16 --jobs 16 --seconds 500 --out FILE

Of each operator and dtype a few calls with gradients; `tests/operators/op_db.py` says which, and how they are judged.
Operators without floats run with int64. A process that crashes or hangs costs one operator. FILE gets a JSON line for
each call that is not right, and a last line with the counts: by dtype the operators, and the calls by what came of
them. Exit code 8 if one failed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from benchmarks.random_programs import Outcome, Run
from tilewright.records.errors import VerificationError

DTYPES = "float32,bfloat16,float16,float64,complex64"


def operators(number: int, device: str, dtypes: str) -> Iterator[Outcome]:
    """What came of the calls of operator `number`, as JSON; first of all of them together, then of each alone."""
    import torch

    from tests.operators.op_db import FINE, judge, op_db

    if device == "cpu":
        torch.set_num_threads(1)
    for outcomes in judge(op_db[number], [getattr(torch, name) for name in dtypes.split(",")], device):
        failed = [one.status for one in outcomes if one.status not in FINE]
        yield max(failed, default="right", key="raised".__eq__), json.dumps([*map(asdict, outcomes)])


@dataclass
class Operators(Run):
    """Counts calls by dtype."""

    def _count(self, worker: object, outcome: Outcome | None) -> None:
        number = worker.number  # type: ignore[attr-defined]
        if number is None or outcome is None:
            return
        kind, message = outcome
        if not message.startswith("["):
            self.counts[kind] += 1
            self._write({"number": number, "op": named(number), "kind": kind, "message": message})
            return
        calls = json.loads(message)
        for dtype in {call["dtype"] for call in calls}:
            self.counts[f"{dtype} operators"] += 1
        for call in calls:
            self.counts[f"{call['dtype']} {call['status']}"] += 1
            if call["status"] != "right":
                self._write({"number": number, **call})


def named(number: int) -> str:
    from tests.operators.op_db import op_db

    return op_db[number].formatted_name


def main() -> None:
    from tests.operators.op_db import op_db

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", default=DTYPES)
    parser.add_argument("--ops", default="", help="a pattern of operators' names")
    parser.add_argument("--first", type=int, default=0, help="number of the first operator")
    parser.add_argument("--count", type=int, default=len(op_db))
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=600, help="when to stop")
    parser.add_argument("--limit", type=float, default=240, help="seconds that one operator may take")
    parser.add_argument("--out", type=Path, help="file that the lines are added to")
    options = parser.parse_args()
    numbers = range(options.first, min(len(op_db), options.first + options.count))
    wanted = [n for n in numbers if re.search(options.ops, op_db[n].formatted_name)]
    run = Operators(options, wanted, partial(operators, dtypes=options.dtypes))
    run.programs()
    run.summary()
    failed = ("wrong", "raised", "inherited", "crashed", "hung")
    sys.exit(VerificationError.exit_code if any(name.split()[-1] in failed for name in run.counts) else 0)


if __name__ == "__main__":
    main()
