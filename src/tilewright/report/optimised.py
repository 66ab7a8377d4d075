"""`optimize` and `bench` of a case in a terminal: verification, times beside peers, memory."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilewright.records.measurement import Measurement, Verified
from tilewright.records.program import Program
from tilewright.report.launch_rows import plain
from tilewright.report.optimised_findings import findings
from tilewright.report.quantity import duration, nbytes, speed_of
from tilewright.report.queries import Answer
from tilewright.report.rows import show_view
from tilewright.report.tables import open_table
from tilewright.report.terminal import fallbacks
from tilewright.report.views import LOST

_TENSORS_SHOWN = 8


def show_optimize(
    program: Program,
    measurements: Sequence[Measurement],
    verified: Sequence[Verified],
    lost: Answer | None = None,
) -> RenderableType:
    """What is slow, verification, times beside peers, and peak memory. `lost` answers the view `LOST`."""
    parts: list[RenderableType] = [Text(plain(f"- {sentence}")) for sentence in findings(program)]
    if lost and lost.rows:
        parts.append(show_view(LOST, lost))
    if verified:
        parts += [Text("\nverification" if parts else "verification", style="bold"), _verification(verified)]
    if measurements:
        parts += [Text("\nmeasurements", style="bold"), _measurements(measurements)]
    if program.memory:
        parts += [Text("\npeak of live memory", style="bold"), _peaks(program)]
    return Group(*parts, *fallbacks(program))


def _verification(verified: Sequence[Verified]) -> RenderableType:
    """Every tensor that broke the contract, then those closest to their bound."""
    table = open_table("", "tensor", "dtype", "error>", "eager's>", "bound>", "largest>", "eager's>", "bound>")
    ranked = sorted(verified, key=lambda tensor: (tensor.ok, -_of_bound(tensor)))
    failed = sum(not tensor.ok for tensor in verified)
    for tensor in ranked[: max(failed, _TENSORS_SHOWN)]:
        table.add_row(
            Text("ok", "green") if tensor.ok else Text("FAILED", "bold red"),
            Text(plain(f"{tensor.direction} {tensor.tensor}")),
            tensor.dtype,
            *(f"{value:.1e}" for value in (tensor.error, tensor.eager_error, tensor.bound)),
            *(f"{value:.1e}" for value in (tensor.max_error, tensor.eager_max_error, tensor.max_bound)),
        )
    left_out = len(verified) - max(failed, _TENSORS_SHOWN)
    summary = f"{len(verified) - failed} of {len(verified)} tensors within the numbers contract"
    if left_out > 0:
        summary += f"; {left_out} further from their bounds are not shown"
    return Group(table, Text(summary, "bold red" if failed else "green"))


def _of_bound(tensor: Verified) -> float:
    share = max(
        tensor.error / tensor.bound if tensor.bound else 0.0,
        tensor.max_error / tensor.max_bound if tensor.max_bound else 0.0,
    )
    return math.inf if math.isnan(share) else share


def _measurements(measurements: Sequence[Measurement]) -> Table:
    """Rows grouped by direction; each peer's time as a multiple of the row's."""
    table = open_table(
        "case", "implementation", "median>", "p20 to p80>", "× eager>", "× inductor>", "peak>", "of ceiling>"
    )
    groups: dict[tuple[str, str, str], list[Measurement]] = {}
    for row in measurements:
        groups.setdefault((row.suite, row.case, row.direction), []).append(row)
    for (suite, case, direction), rows in groups.items():
        for position, row in enumerate(rows):
            table.add_row(
                Text(plain(f"{suite} {case} {direction}") if position == 0 else ""),
                Text(plain(row.impl), "bold" if row.impl == "tilewright" else ""),
                duration(row.median_us),
                f"{duration(row.p20_us)} to {duration(row.p80_us)}",
                _times(rows, "eager", row),
                _times(rows, "inductor", row),
                nbytes(row.peak_bytes) if row.peak_bytes is not None else "-",
                f"{row.of_ceiling:.0%}" if row.of_ceiling is not None else "-",
            )
    return table


def _times(rows: Sequence[Measurement], peer: str, row: Measurement) -> str:
    """How many times as fast as the peer, of several of its rows as the middle one."""
    peers = sorted((other for other in rows if other.impl == peer), key=lambda other: other.median_us)
    return speed_of(row, peers[len(peers) // 2]) if peers else "-"


def _peaks(program: Program) -> Table:
    table = open_table("graph", "before>", "after>", "saved>")
    for graph in dict.fromkeys(point.graph for point in program.memory):
        before, after = (program.peak_bytes(graph, stage) for stage in ("before", "after"))
        table.add_row(
            graph,
            nbytes(before) if before is not None else "-",
            nbytes(after) if after is not None else "-",
            f"{1 - after / before:.0%}" if before and after is not None else "-",
        )
    return table
