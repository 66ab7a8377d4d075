"""The terminal view: pure functions from records to rich renderables, and the same as JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Literal

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
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
from tilewright.report.quantity import count, duration, in_names, nbytes, ratio

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
_TENSORS_SHOWN = 8


def show_explain(program: Program, ceilings: Sequence[Ceiling], dims: Mapping[str, int]) -> RenderableType:
    """What each operator costs, what fusion changes, and why: tables and totals per graph."""
    parts: list[RenderableType] = [_heading(ceilings, dims)]
    names = list(dims)
    for graph in _graphs(program):
        before = [op for op in program.operators if (op.graph, op.stage) == (graph, "before")]
        after = _launches(program, graph)
        parts += [
            Text(f"\n{graph}", style="bold"),
            _operators(before, names),
            _totals("before fusion", before, names),
            _totals("after fusion", after, names),
            _vanished(before, after, names),
        ]
        regions = [region for region in program.regions if region.graph == graph]
        if regions:
            parts += [Text("\nregions", style="bold"), _regions(regions, names)]
        decisions = [decision for decision in program.decisions if decision.graph == graph]
        if decisions:
            parts += [Text("\ndecisions", style="bold"), _decisions(decisions)]
    return Group(*parts, *_fallbacks(program))


def show_optimize(
    program: Program, measurements: Sequence[Measurement], verified: Sequence[Verified]
) -> RenderableType:
    """Do the numbers hold, how fast is it beside its peers, and what memory does it take."""
    parts: list[RenderableType] = []
    if verified:
        parts += [Text("verification", style="bold"), _verification(verified)]
    if measurements:
        parts += [Text("\nmeasurements", style="bold"), _measurements(measurements)]
    if program.memory:
        parts += [Text("\npeak of live memory", style="bold"), _peaks(program)]
    return Group(*parts, *_fallbacks(program))


def as_json(
    program: Program,
    ceilings: Sequence[Ceiling] = (),
    measurements: Sequence[Measurement] = (),
    verified: Sequence[Verified] = (),
) -> str:
    """Everything the terminal shows, field by field; NaN and infinities, which JSON lacks, are null."""
    document = asdict(program) | {
        "ceilings": [asdict(ceiling) for ceiling in ceilings],
        "measurements": [asdict(measurement) for measurement in measurements],
        "verified": [asdict(tensor) for tensor in verified],
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
            f"{ceiling.kind} {ceiling.dtype} {ceiling.value:,.4g} {ceiling.unit}".replace("  ", " ")
            + (" (datasheet)" if ceiling.origin == "datasheet" else "")
            for ceiling in ceilings
            if ceiling.device == device
        ]
        lines.append(plain(f"{device}: {', '.join(figures)}"))
    return Text("\n".join(lines), style="dim")


def _fallbacks(program: Program) -> list[Text]:
    lines = [f"runs as PyTorch runs it: {item.what} at {item.where}: {item.why}" for item in program.fallbacks]
    return [Text(plain(line), "yellow") for line in dict.fromkeys(lines)]


def _graphs(program: Program) -> list[GraphName]:
    return list(dict.fromkeys(op.graph for op in program.operators))


def _launches(program: Program, graph: GraphName) -> list[Operator | Region]:
    """What runs after fusion: the launches if known, else the regions and what no region took."""
    operators = [op for op in program.operators if op.graph == graph]
    after: list[Operator | Region] = [op for op in operators if op.stage == "after"]
    if after:
        return after
    unfused = [op for op in operators if op.region is None]
    return [*unfused, *(region for region in program.regions if region.graph == graph)]


class _FirstThatFits:
    """The first alternative that the terminal is wide enough for, or else the last."""

    def __init__(self, *alternatives: RenderableType) -> None:
        self.alternatives = alternatives

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        *wider, narrowest = self.alternatives
        unbounded = options.update(max_width=10_000)
        for alternative in wider:
            if console.measure(alternative, options=unbounded).maximum <= options.max_width:
                yield alternative
                return
        yield narrowest


def _operators(operators: Sequence[Operator], names: Sequence[str]) -> RenderableType:
    """One row for each, with the whole source line, only its place, or neither, as the width allows."""
    lines = [plain(op.source or "") for op in operators]
    places = [":".join(line.split(":", 2)[:2]) for line in lines]
    return _FirstThatFits(*(_operator_table(operators, names, source) for source in (lines, places, None)))


def _operator_table(operators: Sequence[Operator], names: Sequence[str], source: Sequence[str] | None) -> Table:
    table = _table("#>", "operator", "class", "shape", "reads>", "writes>", "FLOPs>", "FLOP/B>", "floor>")
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
            _pair(op.cost.flops_symbolic, op.cost.flops, names) if known else Text("unknown", "red"),
            f"{op.cost.intensity:.3g}" if known and op.cost.bytes else "-",
            duration(op.floor_us),
            plain(op.bound or "-"),
            *([] if source is None else [Text(source[position])]),
        )
        if op.cost.unused:
            unused = _pair(op.cost.unused_symbolic, op.cost.unused, names)
            label = Text(f"  unused: {_unused_label(op)}", style="italic")
            table.add_row("", label, "", "", "", unused)
    return table


def _table(*columns: str) -> Table:
    """An open table. `>` after a name sets its figures flush right and keeps them on one line."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", pad_edge=False)
    for name in columns:
        right = name.endswith(">")
        table.add_column(name.removesuffix(">"), justify="right" if right else "left", no_wrap=right)
    return table


def _pair(formula: str | None, number: int, names: Sequence[str]) -> Text:
    """The formula with its value below it; a formula that is only a number says nothing new."""
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
    text = Text.assemble(
        (f"\n{title}: ", "bold"),
        f"{len(moving)} launch{'' if len(moving) == 1 else 'es'}",
        f", {nbytes(sum(cost.bytes for cost in costs))} moved",
        f", floor {duration(sum(floors))}" if floors else "",
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
    """What fusion no longer moves: the difference of both totals."""
    old, new = [op.cost for op in before], [launch.cost for launch in after]
    saved = sum(cost.bytes for cost in old) - sum(cost.bytes for cost in new)
    if saved <= 0 or any(cost.provenance == "unknown" for cost in old + new):
        return Text()
    reads, writes = (_sum(old, what, names, without=new) for what in ("reads", "writes"))
    return Text.assemble(("\nvanished: ", "bold"), f"{nbytes(saved)}", f"\n  reads {reads}  writes {writes}")


def _sum(
    costs: Sequence[Cost],
    what: Literal["reads", "writes", "unused", "flops"],
    names: Sequence[str],
    without: Sequence[Cost] = (),
) -> str:
    """The symbolic sum of one count, less those of `without`; the number alone where a term has no formula."""
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


def _regions(regions: Sequence[Region], names: Sequence[str]) -> Table:
    table = _table("region", "operators", "in", "reads>", "writes>", "floor>", "predicted>", "measured>")
    for region in regions:
        table.add_row(
            Text(plain(region.name), "bold"),
            Text(plain(", ".join(region.members))),
            region.language,
            *_traffic(region.cost, names),
            duration(region.floor_us),
            duration(region.predicted_us),
            duration(region.measured_us),
        )
    return table


def _decisions(decisions: Sequence[Decision]) -> Table:
    table = _table("verdict", "pair", "reason", "saved>", "predicted>", "measured>")
    table.add_column("source", overflow="fold", style="dim")
    for decision in decisions:
        table.add_row(
            Text(decision.verdict, _VERDICT_STYLE[decision.verdict]),
            Text(plain(f"{decision.producer} → {decision.consumer}")),
            Text(plain(decision.reason)),
            nbytes(decision.bytes_saved) if decision.bytes_saved else "-",
            duration(decision.predicted_us),
            duration(decision.measured_us),
            Text(plain(decision.source or "")),
        )
    return table


def _verification(verified: Sequence[Verified]) -> RenderableType:
    """Every tensor that broke the contract, then those that came closest to its bound."""
    table = _table("", "tensor", "dtype", "error>", "eager's>", "bound>", "largest>", "eager's>", "bound>")
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
    """Grouped by what was timed; times a peer took, over the time of the row."""
    table = _table(
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
                ratio(_times(rows, "eager", row)),
                ratio(_times(rows, "inductor", row)),
                nbytes(row.peak_bytes) if row.peak_bytes is not None else "-",
                f"{row.of_ceiling:.0%}" if row.of_ceiling is not None else "-",
            )
    return table


def _times(rows: Sequence[Measurement], peer: str, row: Measurement) -> float | None:
    """How many times the peer's median the row's is faster."""
    peers = [other.median_us for other in rows if other.impl == peer]
    return median(peers) / row.median_us if peers and row.median_us else None


def _peaks(program: Program) -> Table:
    table = _table("graph", "before>", "after>", "saved>")
    for graph in dict.fromkeys(point.graph for point in program.memory):
        peak = {
            stage: max(
                (point.live_bytes for point in program.memory if (point.graph, point.stage) == (graph, stage)),
                default=None,
            )
            for stage in ("before", "after")
        }
        before, after = peak["before"], peak["after"]
        table.add_row(
            graph,
            nbytes(before) if before is not None else "-",
            nbytes(after) if after is not None else "-",
            f"{1 - after / before:.0%}" if before and after is not None else "-",
        )
    return table
