"""`explain` in a terminal: pure functions from records to rich renderables, and the same as JSON."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.text import Text

from tilewright.operators.own.product import PRODUCTS_OF_PARTS
from tilewright.records.measurement import Ceiling, Measurement, Verified
from tilewright.records.program import Cost, Decision, GraphName, Operator, Program, Verdict
from tilewright.report.launch_rows import operator_rows, plain, region_rows, unused_label
from tilewright.report.optimised_findings import outcome
from tilewright.report.quantity import count, duration, nbytes
from tilewright.report.tables import FittedTable

_VERDICT_STYLE: Mapping[Verdict, str] = {
    "taken": "green",
    "refused": "yellow",
    "impossible": "bright_black",
    "tried and lost": "red",
}


def show_explain(
    program: Program, ceilings: Sequence[Ceiling], dims: Mapping[str, int], everything: bool = False
) -> RenderableType:
    """Tables and totals per graph: cost of the operators, regions, decisions.

    Unless `everything` is asked for, one row for equal operators, regions, and decisions of a reason, and of operators
    and regions only those with the highest floors.
    """
    parts: list[RenderableType] = [_heading(ceilings, dims)]
    if program.folded:
        parts.append(Text(f"\n{plain(program.folded)}", "yellow"))
    names = list(dims)
    for graph in dict.fromkeys(op.graph for op in program.operators):
        before, after = (
            [op for op in program.operators if (op.graph, op.stage) == (graph, stage)] for stage in ("before", "after")
        )
        parts += [
            Text(f"\n{graph}", style="bold"),
            operator_rows(before, names, everything),
            _totals("before fusion", before, names),
            _totals("after fusion", after, names),
            _saved(before, after, names),
            peak(program, graph),
        ]
        regions = [region for region in program.regions if region.graph == graph]
        if regions:
            parts += [Text("\nregions", style="bold"), region_rows(regions, names, everything)]
        decisions = [decision for decision in program.decisions if decision.graph == graph]
        if decisions:
            groups = [[one] for one in decisions] if everything else _by_reason(decisions)
            parts += [Text("\ndecisions", style="bold"), _decisions(groups)]
    return Group(*parts, *fallbacks(program))


def as_json(
    program: Program,
    ceilings: Sequence[Ceiling] = (),
    measurements: Sequence[Measurement] = (),
    verified: Sequence[Verified] = (),
    lost: Sequence[Mapping[str, Any]] = (),
    run: Path | None = None,
) -> str:
    """The content of the terminal view as JSON; NaN and infinities, which JSON lacks, are null."""
    document = asdict(program) | {
        "outcome": outcome(measurements),
        "run": None if run is None else str(run),
        "ceilings": [asdict(ceiling) for ceiling in ceilings],
        "measurements": [asdict(measurement) for measurement in measurements],
        "verified": [asdict(tensor) for tensor in verified],
        "lost_time": list(lost),
    }
    return json.dumps(_finite(document), indent=1, allow_nan=False)


def _finite(value: object) -> object:
    match value:
        case float() if not math.isfinite(value):
            return None
        case dict():
            return {key: _finite(item) for key, item in value.items()}
        case list() | tuple():
            return [_finite(item) for item in value]
    return value


def _heading(ceilings: Sequence[Ceiling], dims: Mapping[str, int]) -> Text:
    lines = [", ".join(f"{plain(name)} = {size:,}" for name, size in dims.items())] if dims else []
    for device in dict.fromkeys(ceiling.device for ceiling in ceilings):
        of_device = [ceiling for ceiling in ceilings if ceiling.device == device]
        origins = list(dict.fromkeys(ceiling.origin for ceiling in of_device))
        shared = f" ({origins[0]})" if len(origins) == 1 and origins != ["measured"] else ""
        figures = [
            f"{ceiling.kind} {ceiling.dtype} {ceiling.figure}".replace("  ", " ")
            + ("" if shared or ceiling.origin == "measured" else f" ({ceiling.origin})")
            for ceiling in of_device
        ]
        lines.append(plain(f"{device}{shared}: {', '.join(figures)}"))
    return Text("\n".join(lines), style="dim")


def fallbacks(program: Program) -> list[Text]:
    """A line for each part of the program that PyTorch runs."""
    lines = [
        f"runs as PyTorch runs it: {item.what} at {item.where.rstrip(':')}: {item.why}" for item in program.fallbacks
    ]
    return [Text(plain(line), "yellow") for line in dict.fromkeys(lines)]


def _totals(title: str, launches: Sequence[Operator], names: Sequence[str]) -> Text:
    known = [launch for launch in launches if launch.cost.provenance == "formula"]
    moving = [launch for launch in known if launch.cost.bytes]
    costs = [launch.cost for launch in known]
    floors = [launch.floor_us for launch in known if launch.floor_us is not None]
    predicted = [launch.predicted_us for launch in moving if launch.predicted_us is not None]
    text = Text.assemble(
        (f"\n{title}: ", "bold"),
        f"{len(moving):,} launch{'' if len(moving) == 1 else 'es'}",
        f", {nbytes(sum(cost.bytes for cost in costs))} moved",
        f", floor {duration(sum(floors))}" if floors else "",
        f", predicted {duration(sum(predicted))}" if predicted else "",
        f"\n  reads {_sum(costs, 'reads', names)}  writes {_sum(costs, 'writes', names)}",
    )
    wasteful = [launch for launch in known if launch.cost.unused]
    if wasteful:
        first, *others = dict.fromkeys(map(unused_label, wasteful))
        unused = _sum([launch.cost for launch in wasteful], "unused", names)
        text.append(f"\n  unused {unused} ({first}{f' and of {len(others)} more' if others else ''})")
    text.append(f"\n  FLOPs {_sum(costs, 'flops', names)}")
    products = [launch.cost for launch in known if launch.operator_class == "compute"]
    if products:
        text.append(f"\n  matmul FLOPs {_sum(products, 'flops', names)}")
    if any(launch.target == "tilewright.product.default" for launch in known):
        text.append(f" (tilewright.product computes one of fp32 as {PRODUCTS_OF_PARTS} of 16 bits)")
    if len(known) < len(launches):
        text.append(f"\n  and {len(launches) - len(known)} of unknown cost, in none of these sums", "red")
    return text


def _saved(before: Sequence[Operator], after: Sequence[Operator], names: Sequence[str]) -> Text:
    """The traffic that fusion saves: the difference of both totals."""
    old, new = [op.cost for op in before], [launch.cost for launch in after]
    saved = sum(cost.bytes for cost in old) - sum(cost.bytes for cost in new)
    if saved <= 0 or any(cost.provenance == "unknown" for cost in old + new):
        return Text()
    reads, writes, unused = (_sum(old, what, names, without=new) for what in ("reads", "writes", "unused"))
    counts = f"\n  reads {reads}  writes {writes}" + (f"  unused {unused}" if unused != "0" else "")
    if reads + writes + unused == "000":
        counts = ", as elements are smaller"
    return Text.assemble(("\nsaved by fusion: ", "bold"), nbytes(saved), counts)


def peak(program: Program, graph: GraphName, of: str = "") -> Text:
    """The peak of live bytes, without the caller's own tensors; `of` follows what it is."""
    old, new = program.peak_bytes(graph, "before"), program.peak_bytes(graph, "after")
    if old is None or new is None:
        return Text()
    return Text.assemble((f"\npeak of live memory{of}: ", "bold"), f"{nbytes(old)} before fusion, {nbytes(new)} after")


def _sum(
    costs: Sequence[Cost],
    what: Literal["reads", "writes", "unused", "flops"],
    names: Sequence[str],
    without: Sequence[Cost] = (),
) -> str:
    """The symbolic sum of one count minus that of `without`; only the number if a term has no formula."""
    from tilewright.cost.symbols import parse, pretty

    def terms(costs: Sequence[Cost]) -> list[tuple[int, str | None]]:
        return [(getattr(cost, what), getattr(cost, f"{what}_symbolic")) for cost in costs]

    added, taken = terms(costs), terms(without)
    number = count(sum(number for number, _ in added) - sum(number for number, _ in taken))
    if any(formula is None and amount for amount, formula in added + taken):
        return number
    times = Counter(formula for _, formula in added)
    times.subtract(Counter(formula for _, formula in taken))
    try:
        formula = pretty(sum(many * parse(formula or "0") for formula, many in times.items()), names)
    except ValueError:
        # A run may come from elsewhere: where `parse` refuses a formula, the number alone is shown.
        return number
    return number if formula.isdigit() else formula


def _by_reason(decisions: Sequence[Decision]) -> list[list[Decision]]:
    """Decisions of one verdict and reason together, in the order of the first of each."""
    groups: dict[tuple[str, str], list[Decision]] = {}
    for decision in decisions:
        groups.setdefault((decision.verdict, decision.reason), []).append(decision)
    return list(groups.values())


def pair(decision: Decision) -> str:
    """Producer and consumer; one name where a decision is on one operator."""
    ends = dict.fromkeys((decision.producer, decision.consumer))
    return " → ".join(ends)


def _decisions(groups: Sequence[Sequence[Decision]]) -> FittedTable:
    """A row per group of one reason, with the source line of its first."""
    table = FittedTable(("verdict", "pair…", "reason…", "saved>", "predicted>", "measured>", "source…"), ("source",))
    for group in groups:
        first, saved = group[0], sum(decision.bytes_saved or 0 for decision in group)
        more = f" and {len(group) - 1:,} more" if len(group) > 1 else ""
        table.add_row(
            Text(first.verdict, _VERDICT_STYLE[first.verdict]),
            Text(plain(pair(first)) + more),
            Text(plain(first.reason)),
            nbytes(saved) if saved else "-",
            *(duration(us) if not more else "" for us in (first.predicted_us, first.measured_us)),
            Text(plain(first.source or ""), "dim"),
        )
    return table
