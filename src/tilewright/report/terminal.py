"""`explain` in a terminal: pure functions from records to rich renderables, and the same as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal, TypeVar

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilewright.records.measurement import Ceiling, Measurement, Verified
from tilewright.records.program import (
    Cost,
    Decision,
    GraphName,
    Operator,
    OperatorClass,
    Program,
    Region,
    Verdict,
)
from tilewright.report.quantity import count, duration, in_names, nbytes
from tilewright.report.tables import FirstThatFits, open_table

CLASS_STYLE: Mapping[OperatorClass, str] = {
    "compute": "blue",
    "pointwise": "green",
    "reduction": "yellow",
    "layout": "bright_black",
    "random": "magenta",
    "library": "cyan",
    "unknown": "red",
}
_VERDICT_STYLE: Mapping[Verdict, str] = {
    "taken": "green",
    "refused": "yellow",
    "impossible": "bright_black",
    "tried and lost": "red",
}
_WITH_INDICES = ("max", "min", "median", "nanmedian", "mode", "cummax", "cummin", "sort", "topk", "kthvalue")


_DEAREST = 10
"""Rows of a summary."""


def show_explain(
    program: Program, ceilings: Sequence[Ceiling], dims: Mapping[str, int], everything: bool = False
) -> RenderableType:
    """Tables and totals per graph: cost of the operators, regions, decisions.

    Unless `everything` is asked for, of operators and regions only those with the highest floors, and one row for all
    decisions of a reason.
    """
    parts: list[RenderableType] = [_heading(ceilings, dims)]
    names = list(dims)
    for graph in _graphs(program):
        before = [op for op in program.operators if (op.graph, op.stage) == (graph, "before")]
        after = _launches(program, graph)
        parts += [
            Text(f"\n{graph}", style="bold"),
            _operators(before, names, everything),
            _totals("before fusion", before, names),
            _totals("after fusion", after, names),
            _vanished(before, after, names),
            _peak(program, graph),
        ]
        regions = [region for region in program.regions if region.graph == graph]
        if regions:
            shown = regions if everything else _dearest(regions)
            parts += [Text("\nregions", style="bold"), _regions(shown, names), _rest(shown, regions, "regions")]
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
) -> str:
    """The content of the terminal view as JSON; NaN and infinities, which JSON lacks, are null."""
    document = asdict(program) | {
        "ceilings": [asdict(ceiling) for ceiling in ceilings],
        "measurements": [asdict(measurement) for measurement in measurements],
        "verified": [asdict(tensor) for tensor in verified],
        "lost_time": list(lost),
    }
    return json.dumps(_finite(document), indent=1, allow_nan=False)


def plain(text: str) -> str:
    """`text` without control characters, which could move the cursor or hide what follows."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


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
        figures = [
            f"{ceiling.kind} {ceiling.dtype} {ceiling.value:,.4g} {ceiling.unit.replace('us', 'µs')}".replace("  ", " ")
            + (" (datasheet)" if ceiling.origin == "datasheet" else "")
            for ceiling in ceilings
            if ceiling.device == device
        ]
        lines.append(plain(f"{device}: {', '.join(figures)}"))
    return Text("\n".join(lines), style="dim")


def fallbacks(program: Program) -> list[Text]:
    """A line for each part of the program that PyTorch runs."""
    lines = [f"runs as PyTorch runs it: {item.what} at {item.where}: {item.why}" for item in program.fallbacks]
    return [Text(plain(line), "yellow") for line in dict.fromkeys(lines)]


def _graphs(program: Program) -> list[GraphName]:
    return list(dict.fromkeys(op.graph for op in program.operators))


def _launches(program: Program, graph: GraphName) -> list[Operator | Region]:
    """The kernels after fusion: the launches if known, else the regions and the operators in no region."""
    operators = [op for op in program.operators if op.graph == graph]
    after: list[Operator | Region] = [op for op in operators if op.stage == "after"]
    if after:
        return after
    unfused = [op for op in operators if op.region is None]
    return [*unfused, *(region for region in program.regions if region.graph == graph)]


Priced = TypeVar("Priced", Operator, Region)


def _dearest(rows: Sequence[Priced]) -> Sequence[Priced]:
    """Those with the highest floors, in the order of the program; an unknown cost may be any."""
    dearest = sorted(rows, key=lambda row: -math.inf if row.floor_us is None else -row.floor_us)[:_DEAREST]
    kept = set(map(id, dearest))
    return [row for row in rows if id(row) in kept]


def _rest(shown: Sequence[object], rows: Sequence[object], what: str) -> Text:
    left = len(rows) - len(shown)
    return Text(
        f"and {left:,} {what} with lower floors; --all has them" if left else "", "dim", end="\n" if left else ""
    )


def _operators(operators: Sequence[Operator], names: Sequence[str], everything: bool) -> RenderableType:
    """A row for each operator that moves or computes anything, or for the dearest.

    With what the width allows: the source line, only its place, or neither; then brief rows.
    """
    costly = [op for op in operators if not _is_free(op)]
    shown = costly if everything else _dearest(costly)
    lines = [plain(op.source or "") for op in shown]
    full = [_operator_table(shown, names, source) for source in (lines, [*map(place, lines)], None)]
    table = FirstThatFits(*full, _brief_table(shown, names, formulas=True), _brief_table(shown, names))
    parts: list[RenderableType] = [table, _rest(shown, costly, "operators")]
    if free := len(operators) - len(costly):
        parts.append(Text(f"and {free} view{'s' if free > 1 else ''} that cost nothing; --tree has them", "dim"))
    return Group(*parts)


def _is_free(op: Operator) -> bool:
    cost = op.cost
    return op.operator_class == "layout" and cost.provenance == "formula" and not (cost.bytes or cost.flops)


def place(source: str) -> str:
    """`file.py:12` of `file.py:12: the line`."""
    return ":".join(source.split(":", 2)[:2])


def _brief_table(operators: Sequence[Operator], names: Sequence[str], formulas: bool = False) -> Table:
    """For a narrow terminal: the class is a colour, and formulas appear only if `formulas`."""
    table = open_table("#>", "operator", "shape", "reads>", "writes>", "FLOPs>", "floor>")
    table.columns[1].overflow = "fold"
    table.add_column("bound", no_wrap=True)
    for op in operators:
        reads, writes = _traffic(op.cost, names)
        flops = _flops(op.cost, names)
        table.add_row(
            str(op.index),
            Text(plain(op.name), CLASS_STYLE[op.operator_class]),
            _two_lines(op.shape_symbolic if formulas else None, str(list(op.shape))),
            *(text if formulas else text.split()[-1] for text in (reads, writes, flops)),
            duration(op.floor_us),
            plain(op.bound or "-").removesuffix("-bound"),
        )
        if op.cost.unused:
            unused = _pair(op.cost.unused_symbolic, op.cost.unused, names)
            label = Text(f"  unused: {_unused_label(op)}", style="italic")
            table.add_row("", label, "", "", unused if formulas else unused.split()[-1])
    return table


def _operator_table(operators: Sequence[Operator], names: Sequence[str], source: Sequence[str] | None) -> Table:
    counts = ("reads>", "writes>", "FLOPs>", "FLOP/B>")
    table = open_table("#>", "operator", "class", "shape", *counts, "floor>", "predicted>")
    table.add_column("bound", no_wrap=True)
    if source is not None:
        table.add_column("source", no_wrap=True, style="dim")
    for position, op in enumerate(operators):
        known = op.cost.provenance == "formula"
        table.add_row(
            str(op.index),
            Text(plain(op.name)),
            Text(op.operator_class, style=CLASS_STYLE[op.operator_class]),
            _two_lines(op.shape_symbolic, str(list(op.shape))),
            *_traffic(op.cost, names),
            _flops(op.cost, names),
            f"{op.cost.intensity:.3g}" if known and op.cost.bytes else "-",
            duration(op.floor_us),
            duration(op.predicted_us),
            plain(op.bound or "-"),
            *([] if source is None else [Text(source[position])]),
        )
        if op.cost.unused:
            unused = _pair(op.cost.unused_symbolic, op.cost.unused, names)
            label = Text(f"  unused: {_unused_label(op)}", style="italic")
            table.add_row("", label, "", "", "", unused)
    return table


def _pair(formula: str | None, number: int, names: Sequence[str]) -> Text:
    """The formula with its value below it; a formula that is a number is omitted."""
    if formula is None or formula.isdigit():
        return Text(count(number))
    return _two_lines(in_names(formula, names), count(number))


def _two_lines(formula: str | None, number: str) -> Text:
    return Text(number) if formula is None else Text.assemble(plain(formula), "\n", (number, "dim"))


def _unused_label(launch: Operator | Region) -> str:
    if isinstance(launch, Operator):
        name = plain(launch.target).removeprefix("aten.").partition(".")[0]
        if name in _WITH_INDICES:
            return f"indices of {name}"
    return f"values of {plain(launch.name)}"


def _totals(title: str, launches: Sequence[Operator | Region], names: Sequence[str]) -> Text:
    known = [launch for launch in launches if launch.cost.provenance == "formula"]
    moving = [launch for launch in known if launch.cost.bytes]
    costs = [launch.cost for launch in known]
    floors = [launch.floor_us for launch in known if launch.floor_us is not None]
    predicted = [launch.predicted_us for launch in moving if launch.predicted_us is not None]
    text = Text.assemble(
        (f"\n{title}: ", "bold"),
        f"{len(moving)} launch{'' if len(moving) == 1 else 'es'}",
        f", {nbytes(sum(cost.bytes for cost in costs))} moved",
        f", floor {duration(sum(floors))}" if floors else "",
        f", predicted {duration(sum(predicted))}" if predicted else "",
        f"\n  reads {_sum(costs, 'reads', names)}  writes {_sum(costs, 'writes', names)}",
    )
    wasteful = [launch for launch in known if launch.cost.unused]
    if wasteful:
        labels = ", ".join(dict.fromkeys(map(_unused_label, wasteful)))
        text.append(f"\n  unused {_sum([launch.cost for launch in wasteful], 'unused', names)} ({labels})")
    text.append(f"\n  FLOPs {_sum(costs, 'flops', names)}")
    products = [launch.cost for launch in known if isinstance(launch, Operator) and launch.operator_class == "compute"]
    if products:
        text.append(f"\n  matmul FLOPs {_sum(products, 'flops', names)}")
    if len(known) < len(launches):
        text.append(f"\n  and {len(launches) - len(known)} of unknown cost, in none of these sums", "red")
    return text


def _vanished(before: Sequence[Operator], after: Sequence[Operator | Region], names: Sequence[str]) -> Text:
    """The traffic that fusion saves: the difference of both totals."""
    old, new = [op.cost for op in before], [launch.cost for launch in after]
    saved = sum(cost.bytes for cost in old) - sum(cost.bytes for cost in new)
    if saved <= 0 or any(cost.provenance == "unknown" for cost in old + new):
        return Text()
    reads, writes = (_sum(old, what, names, without=new) for what in ("reads", "writes"))
    return Text.assemble(("\nvanished: ", "bold"), f"{nbytes(saved)}", f"\n  reads {reads}  writes {writes}")


def _peak(program: Program, graph: GraphName) -> Text:
    """The most that lives at once beside what the caller holds."""
    before, after = program.peak_bytes(graph, "before"), program.peak_bytes(graph, "after")
    if before is None or after is None:
        return Text()
    return Text.assemble(("\npeak of live memory: ", "bold"), f"{nbytes(before)} before fusion, {nbytes(after)} after")


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
    try:
        if all(formula is not None or not number for number, formula in added + taken):
            return pretty(sum(parse(f or "0") for _, f in added) - sum(parse(f or "0") for _, f in taken), names)
    except ValueError:
        pass
    return count(sum(number for number, _ in added) - sum(number for number, _ in taken))


def _traffic(cost: Cost, names: Sequence[str]) -> tuple[Text, Text]:
    if cost.provenance == "unknown":
        return Text("unknown", "red"), Text("unknown", "red")
    return _pair(cost.reads_symbolic, cost.reads, names), _pair(cost.writes_symbolic, cost.writes, names)


def _flops(cost: Cost, names: Sequence[str]) -> Text:
    return _pair(cost.flops_symbolic, cost.flops, names) if cost.provenance == "formula" else Text("unknown", "red")


def _regions(regions: Sequence[Region], names: Sequence[str]) -> RenderableType:
    """A row per region; a narrow terminal omits the members, which the name abbreviates, then the formulas."""
    tables = [_region_table(regions, names, members) for members in (48, 28, 0)]
    return FirstThatFits(*tables, _region_table(regions, names, members=0, formulas=False))


def _region_table(regions: Sequence[Region], names: Sequence[str], members: int, formulas: bool = True) -> Table:
    """`members` is the width of the list of operators, which wraps."""
    operators = ["operators"] if members else []
    table = open_table("region", *operators, "in", "reads>", "writes>", "floor>", "predicted>", "measured>")
    if members:
        table.columns[1].max_width = members
    for region in regions:
        traffic = _traffic(region.cost, names)
        table.add_row(
            Text(plain(region.name), "bold"),
            *([Text(plain(", ".join(region.members)))] if members else []),
            region.language,
            *(text if formulas else text.split()[-1] for text in traffic),
            duration(region.floor_us),
            duration(region.predicted_us),
            duration(region.measured_us),
        )
    return table


def _by_reason(decisions: Sequence[Decision]) -> list[list[Decision]]:
    """Decisions of one verdict and reason together, in the order of the first of each."""
    groups: dict[tuple[str, str], list[Decision]] = {}
    for decision in decisions:
        groups.setdefault((decision.verdict, decision.reason), []).append(decision)
    return list(groups.values())


def _decisions(groups: Sequence[Sequence[Decision]]) -> RenderableType:
    """A row per group of one reason, with the source line of its first or, if that is too wide, only its place."""
    lines = [plain(group[0].source or "") for group in groups]
    return FirstThatFits(*(_decision_table(groups, source) for source in (lines, [*map(place, lines)])))


def _decision_table(groups: Sequence[Sequence[Decision]], source: Sequence[str]) -> Table:
    table = open_table("verdict", "pair", "reason", "saved>", "predicted>", "measured>")
    table.add_column("source", no_wrap=True, style="dim")
    for group, line in zip(groups, source, strict=True):
        first, saved = group[0], sum(decision.bytes_saved or 0 for decision in group)
        more = f" and {len(group) - 1:,} more" if len(group) > 1 else ""
        table.add_row(
            Text(first.verdict, _VERDICT_STYLE[first.verdict]),
            Text(plain(f"{first.producer} → {first.consumer}") + more),
            Text(plain(first.reason)),
            nbytes(saved) if saved else "-",
            *(duration(us) if not more else "" for us in (first.predicted_us, first.measured_us)),
            Text(line),
        )
    return table
