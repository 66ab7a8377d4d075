"""Rows of operators and regions in a terminal: equal ones in one row, with their number."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rich.console import Group, RenderableType
from rich.text import Text

from tilewright.records.program import Cost, Operator, OperatorClass, Region
from tilewright.report.quantity import count, duration, in_names
from tilewright.report.tables import FittedTable

CLASS_STYLE: Mapping[OperatorClass, str] = {
    "compute": "blue",
    "pointwise": "green",
    "reduction": "yellow",
    "layout": "bright_black",
    "random": "magenta",
    "library": "cyan",
    "unknown": "red",
}
_WITH_INDICES = ("max", "min", "median", "nanmedian", "mode", "cummax", "cummin", "sort", "topk", "kthvalue")
_MOST_KINDS = 10
"""Rows of a summary."""
_FEW_MEMBERS = 16
"""A summary names the operators of a region up to this many."""


Priced = TypeVar("Priced", Operator, Region)


@dataclass(frozen=True)
class Alike(Generic[Priced]):
    """Equal operators, or equal regions: the first of them, and their number."""

    first: Priced
    number: int

    @property
    def floor_us(self) -> float:
        """The sum of the floors; infinite if a floor is unknown."""
        return math.inf if self.first.floor_us is None else self.first.floor_us * self.number


def operator_rows(operators: Sequence[Operator], names: Sequence[str], everything: bool) -> RenderableType:
    """A row for each operator that moves or computes anything; unless `everything`, for the most expensive kinds."""
    costly = [op for op in operators if not _is_free(op)]
    kinds = _kinds(costly, _kind_of_operator, everything)
    shown = kinds if everything else _most_expensive(kinds)
    parts: list[RenderableType] = [_operator_table(shown, names), _rest(shown, costly, "operators")]
    if free := len(operators) - len(costly):
        views = (
            f"{free:,} views that cost nothing; --tree has them"
            if free > 1
            else "a view that costs nothing; --tree has it"
        )
        parts.append(Text(f"and {views}", "dim"))
    return Group(*parts)


def region_rows(regions: Sequence[Region], names: Sequence[str], everything: bool) -> RenderableType:
    """A row for each region; unless `everything`, for the most expensive kinds of them."""
    kinds = _kinds(regions, _kind_of_region, everything)
    shown = kinds if everything else _most_expensive(kinds)
    return Group(_region_table(shown, names, everything), _rest(shown, regions, "regions"))


def _kinds(rows: Sequence[Priced], kind_of: Callable[[Priced], Hashable], everything: bool) -> list[Alike[Priced]]:
    if everything:
        return [Alike(row, 1) for row in rows]
    first: dict[Hashable, Priced] = {}
    number: Counter[Hashable] = Counter()
    for row in rows:
        kind = kind_of(row)
        first.setdefault(kind, row)
        number[kind] += 1
    return [Alike(row, number[kind]) for kind, row in first.items()]


def _kind_of_operator(op: Operator) -> Hashable:
    return op.target, op.source, op.shape, op.dtype, op.cost, op.floor_us, op.measured_us


def _kind_of_region(region: Region) -> Hashable:
    members = frozenset(Counter(map(word, region.members)).items())
    return members, region.language, region.cost, region.floor_us, region.measured_us


def word(name: str) -> str:
    """What an operator does, by its name: `maximum` of `maximum_20`.

    >>> word("native_layer_norm_3"), word("exp2")
    ('native_layer_norm', 'exp2')
    """
    base, _, number = name.rpartition("_")
    return base if base and number.isdigit() else name


def _most_expensive(kinds: Sequence[Alike[Priced]]) -> Sequence[Alike[Priced]]:
    """The kinds with the highest floors, in the order of the program."""
    most_expensive = sorted(kinds, key=lambda kind: -kind.floor_us)[:_MOST_KINDS]
    kept = set(map(id, most_expensive))
    return [kind for kind in kinds if id(kind) in kept]


def _rest(shown: Sequence[Alike[Priced]], rows: Sequence[Priced], what: str) -> Text:
    left = len(rows) - sum(kind.number for kind in shown)
    return Text(
        f"and {left:,} {what} with lower floors; --all has them" if left else "", "dim", end="\n" if left else ""
    )


def _times(kinds: Sequence[Alike[Priced]]) -> list[str]:
    """The heading of the column of counts, if any kind has several members."""
    return ["times>"] if any(kind.number > 1 for kind in kinds) else []


def _operator_table(kinds: Sequence[Alike[Operator]], names: Sequence[str]) -> FittedTable:
    """The table of operators; a narrow terminal omits columns, which the page and JSON have."""
    several = _times(kinds)
    columns = ["#>", "operator…", *several, "class", "shape", "reads>", "writes>", "FLOPs>", "FLOP/B>", "floor>"]
    table = FittedTable(
        [*columns, "predicted>", "bound", "source…"],
        left_out=("source", "predicted", "FLOP/B", "class", "shape", "FLOPs"),
    )
    for kind in kinds:
        op = kind.first
        known = op.cost.provenance == "formula"
        table.add_row(
            str(op.index),
            Text(plain(op.name), CLASS_STYLE[op.operator_class]),
            *(f"{kind.number:,}" for _ in several),
            Text(op.operator_class, style=CLASS_STYLE[op.operator_class]),
            _two_lines(op.shape_symbolic, str(list(op.shape))),
            *_traffic(op.cost, names),
            _flops(op.cost, names),
            f"{op.cost.intensity:.3g}" if known and op.cost.bytes else "-",
            duration(op.floor_us),
            duration(op.predicted_us),
            plain(op.bound or "-"),
            Text(plain(op.source or ""), "dim"),
        )
        if op.cost.unused:
            unused = _pair(op.cost.unused_symbolic, op.cost.unused, names)
            label = Text(f"  unused: {unused_label(op)}", style="italic")
            table.add_row("", label, *("" for _ in several), "", "", "", unused, *[""] * 6)
    return table


def _region_table(kinds: Sequence[Alike[Region]], names: Sequence[str], everything: bool) -> FittedTable:
    several = _times(kinds)
    columns = ["region", *several, "operators…", "in", "reads>", "writes>", "floor>", "predicted>", "measured>"]
    table = FittedTable(columns, left_out=("operators", "predicted", "in", "reads"))
    for kind in kinds:
        region = kind.first
        table.add_row(
            Text(plain(region.name), "bold"),
            *(f"{kind.number:,}" for _ in several),
            Text(plain(_members(region, everything))),
            region.language,
            *_traffic(region.cost, names),
            duration(region.floor_us),
            duration(region.predicted_us),
            duration(region.measured_us),
        )
        if everything:
            table.add_row("", *("" for _ in several), Text(region.schedule, style="italic"), *[""] * 6)
    return table


def _members(region: Region, everything: bool) -> str:
    """Their names; in a summary of many, how many there are of each."""
    if everything or len(region.members) <= _FEW_MEMBERS:
        return ", ".join(region.members)
    words = Counter(map(word, region.members))
    return ", ".join(f"{number} {name}" if number > 1 else name for name, number in words.items())


def _is_free(op: Operator) -> bool:
    cost = op.cost
    return op.operator_class == "layout" and cost.provenance == "formula" and not (cost.bytes or cost.flops)


def plain(text: str) -> str:
    """`text` without control characters, which could move the cursor or hide what follows."""
    return "".join(char if char.isprintable() else "\ufffd" for char in text)


def _pair(formula: str | None, number: int, names: Sequence[str]) -> Text:
    """The formula with its value below it; a formula that is a number is omitted."""
    if formula is None or formula.isdigit():
        return Text(count(number))
    return _two_lines(in_names(formula, names), count(number))


def _two_lines(formula: str | None, number: str) -> Text:
    return Text(number) if formula in (None, number) else Text.assemble(plain(formula), "\n", (number, "dim"))


def unused_label(launch: Operator) -> str:
    """`indices of max` or, where only the result as a whole is known, `values of` it."""
    name = plain(launch.target).removeprefix("aten.").partition(".")[0]
    return f"indices of {name}" if name in _WITH_INDICES else f"values of {plain(launch.name)}"


def _traffic(cost: Cost, names: Sequence[str]) -> tuple[Text, Text]:
    if cost.provenance == "unknown":
        return Text("unknown", "red"), Text("unknown", "red")
    return _pair(cost.reads_symbolic, cost.reads, names), _pair(cost.writes_symbolic, cost.writes, names)


def _flops(cost: Cost, names: Sequence[str]) -> Text:
    return _pair(cost.flops_symbolic, cost.flops, names) if cost.provenance == "formula" else Text("unknown", "red")
