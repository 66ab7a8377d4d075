"""`optimize` in a terminal: the outcome, what is slow, verification, times beside peers, memory."""

from __future__ import annotations

from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from tilewright.records.measurement import Ceiling, Measurement, Verified
from tilewright.report.launch_rows import plain
from tilewright.report.optimised_findings import findings, outcome
from tilewright.report.queries import ask_view
from tilewright.report.rows import show_view
from tilewright.report.terminal import fallbacks, peak
from tilewright.report.views import LOST, MEASUREMENTS, VERIFIED
from tilewright.store import read_program, read_rows

_ROWS = 10


def show_optimize(run: Path, top: int) -> RenderableType:
    """The outcome, what is slow, the `top` launches by the time they lose, verification, times beside peers, memory.

    Raises:
        StoreError: the run is missing or damaged.
    """
    program, verified = read_program(run), read_rows(run, Verified)
    timed = read_rows(run, Measurement)
    parts: list[RenderableType] = [Text(sentence, "bold") for sentence in outcome(timed)]
    parts += [Text(plain(f"- {sentence}")) for sentence in findings(program, timed, read_rows(run, Ceiling))]
    for view, most in ((LOST, top), (VERIFIED, _ROWS), (MEASUREMENTS, _ROWS)):
        answer = ask_view(run, view, most)
        if answer.rows:
            parts.append(show_view(view, answer, most))
        if view is VERIFIED and verified:
            held = sum(tensor.ok for tensor in verified)
            summary = f"{held} of {len(verified)} tensors within the numbers contract"
            parts.append(Text(summary, "green" if held == len(verified) else "bold red"))
    parts += [peak(program, graph, f", {graph}") for graph in dict.fromkeys(point.graph for point in program.memory)]
    return Group(*parts, *fallbacks(program))
