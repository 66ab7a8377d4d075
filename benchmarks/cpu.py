"""CPU speed beside every peer, in one interleaved run a case; rewrites benchmarks/results/cpu/.

    python benchmarks/cpu.py [--seconds 30] [SUITE ...]

Each suite runs in a process of its own: after the others, in one process, every implementation of the block
was slower, and not by the same factor.

Peers: `eager`, `eager-sdpa` (attention by hand as SDPA), `inductor`, the library operator `torch` where one
exists, and with a warm output that was touched before `inductor-out` and `torch-out`: where those are as fast
as tilewright, the win is the memory pool's and not the kernel's.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from examples import gelu_dropout_residual, manual_gelu, naive_softmax, transformer_block
from tilewright.compile.price import price_case
from tilewright.hardware.profiles import local_profile
from tilewright.hardware.target import absent
from tilewright.measure.racing.results import write_results
from tilewright.measure.truth.verify import verify
from tilewright.records.case import Case
from tilewright.verbs import Subject, measure

RESULTS = Path(__file__).parent / "results" / "cpu"
Peers = Mapping[str, Callable[..., Any]]


def _into(operator: Callable[..., torch.Tensor], **options: Any) -> Peers:
    """A library operator, and the same writing to a warm output."""
    held: list[torch.Tensor] = []

    def warm(*inputs: torch.Tensor) -> torch.Tensor:
        if not held:
            held.append(torch.empty_like(inputs[0]).zero_())
        return operator(*inputs, **options, out=held[0])

    return {"torch": lambda *inputs: operator(*inputs, **options), "torch-out": warm}


def _softmax(x: torch.Tensor, **out: Any) -> torch.Tensor:
    return torch.softmax(x, 1, **out)


def _gelu(x: torch.Tensor, **options: Any) -> torch.Tensor:
    if "out" in options:
        return torch.ops.aten.gelu.out(x, approximate="tanh", out=options["out"])
    return torch.nn.functional.gelu(x, approximate="tanh")


def suites() -> dict[str, list[tuple[Case, Peers]]]:
    """The cases of each result file."""
    nothing: Peers = {}
    inference = [
        ("softmax", naive_softmax.case(), _into(_softmax)),
        ("gelu", manual_gelu.case(), _into(_gelu)),
        ("dropout_add", gelu_dropout_residual.case(), nothing),
    ]
    found = {suite: [(replace(case, training=False), peers)] for suite, case, peers in inference}
    blocks = [
        transformer_block.case(D=D, H=H, B=B, S=S, dropout=dropout, name=f"dropout {dropout}")
        for D, H, B, S in ((256, 8, 4, 512), (768, 12, 2, 1024))
        for dropout in (0.0, 0.1)
    ]
    found["block"] = [(block, nothing) for block in blocks]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0)
    parser.add_argument("suite", nargs="*", default=list(suites()))
    options = parser.parse_args()
    if len(options.suite) == 1:
        run(options.suite[0], options.seconds)
        return
    for suite in options.suite:
        subprocess.run([sys.executable, __file__, "--seconds", str(options.seconds), suite], check=True)


def run(suite: str, seconds: float) -> None:
    """Measure the cases of one suite, each verified first, and rewrite its result file."""
    rows = []
    for case, peers in suites()[suite]:
        program = price_case(case, absent(local_profile())).program
        subject = Subject(case)
        subject.functions.update(peers)
        proof = verify(subject.model, subject.functions["tilewright"], subject.inputs, training=case.training)
        assert all(v.ok for v in proof), proof
        measured = measure(subject, program, suite=suite, seconds=seconds, impls=list(subject.functions))
        note = f" {case.name}" if suite == "block" else ""
        rows += [replace(row, case=row.case + note) for row in measured]
    write_results(RESULTS / f"{suite}.jsonl", rows)
    for row in rows:
        peak = (row.peak_bytes or 0) / 1e6
        print(f"{row.suite:12} {row.case:38} {row.impl:14} {row.median_us / 1e3:9.2f} ms  {peak:8.1f} MB", flush=True)


if __name__ == "__main__":
    main()
