"""Prices a program of which equal iterations were left out as if all had been captured.

The rows of one iteration, or of the few that a cycle of kernels covers (19 columns in one kernel), are repeated as
often as the iterations left out hold them. Live memory grows, or not, as it does from one such cycle to the next.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TypeVar

from torch import fx

from tilewright.capture.call_cycles import ITERATION, Folded, Loop, longest_cycle
from tilewright.passes.schedule import Unit
from tilewright.records.errors import CaptureError
from tilewright.records.program import Decision, GraphName, MemoryPoint, Operator, Program, Stage

LEAST_SHARE = 3
"""A part goes through the iterations if its cycles cover at least one third of those kept."""

Row = TypeVar("Row", Operator, MemoryPoint, Decision)

Iterations = Mapping[str, int]
"""By name of an operator or a launch: the iteration in which it begins, or `ELSEWHERE`."""
ELSEWHERE = -1
"""In place of the iteration: another loop's."""


class Irregular(CaptureError):
    """The kept iterations are planned differently, so the rows of those left out do not follow from them."""


@dataclass(frozen=True)
class _Repeat:
    """Rows `start` to `end`, which are repeated `times` more."""

    start: int
    end: int
    times: int

    @property
    def length(self) -> int:
        return self.end - self.start


def iterations(units: Iterable[Unit], loop: int) -> Iterations:
    """The iteration of loop number `loop` in which each unit begins, for units within a loop."""
    found: dict[str, int] = {}
    for unit in units:
        nodes = [unit] if isinstance(unit, fx.Node) else unit.members
        for node in nodes:
            within, number = (node.meta.get("custom") or {}).get(ITERATION, (None, 0))
            if within is not None and within != loop:
                found[unit.name] = ELSEWHERE
            elif within is not None:
                found[unit.name] = min(number, found.get(unit.name, number))
    return found


def with_all_iterations(
    program: Program,
    loop: Loop,
    eager: Mapping[GraphName, Iterations],
    planned: Mapping[GraphName, Iterations],
    operators: Mapping[GraphName, Iterations],
) -> Program:
    """The program's rows with all iterations of one loop, from those that were kept of it.

    Raises `Irregular` where they show no cycle.

    The iterations are those of eager's operators, of the launches planned, and of the operators that were planned.
    """
    whole = Program(fallbacks=program.fallbacks)
    stages: Mapping[Stage, Mapping[GraphName, Iterations]] = {"before": eager, "after": planned}
    saved: dict[Stage, int] = {}
    for graph in eager:
        for stage, places in stages.items():
            rows = [op for op in program.operators if (op.graph, op.stage) == (graph, stage)]
            points = [p for p in program.memory if (p.graph, p.stage) == (graph, stage)]
            launches = {op.name for op in rows if not op.is_view}
            points = [point for point in points if point.name in launches]
            rows = _all_operators(rows, places[graph], loop.left_out)
            whole.operators += rows
            held = saved.get(stage, 0) if graph == "backward" else 0
            every = _all_points(points, places[graph], loop.left_out, held)
            saved[stage] = every[-1].live_bytes - points[-1].live_bytes if every else 0
            whole.memory += every
            if stage == "after":
                regions = {region.name: region for region in program.regions if region.graph == graph}
                # The third copy of a row has a name that ends in `.3`.
                whole.regions += [replace(regions[op.name.split(".")[0]], name=op.name) for op in rows if op.region]
        decisions = [decision for decision in program.decisions if decision.graph == graph]
        whole.decisions += _all_decisions(decisions, operators[graph], loop.left_out)
    return whole


def in_words(part: Folded) -> str:
    """How much of a program was captured: one sentence."""
    loops = ", ".join(
        f"of which {loop.cycle.count:,} iterations of {loop.cycle.length} each from {loop.place} on; {loop.kept} "
        f"iterations were captured and planned, and the other {loop.left_out:,} counted as these"
        for loop in part.loops
    )
    return f"{part.calls:,} calls, {loops}"


def _repeats(kinds: Sequence[Hashable], places: Sequence[int | None], left_out: int) -> list[_Repeat]:
    """The last whole cycle of each part that goes through the iterations, the last part first.

    A backward graph has two such parts: what is computed again, and the gradients.
    """
    standing = [i for i, place in enumerate(places) if place not in (None, ELSEWHERE)]
    if not standing:
        return []
    kept = max(place for place in places if place is not None)
    found: list[_Repeat] = []
    # Calls before or after the iterations may repeat too, and so may those of another loop; they are not part of it.
    ends = [standing[0] - 1, *(i for i, place in enumerate(places) if place == ELSEWHERE), standing[-1] + 1]
    segments = [(max(a + 1, standing[0]), min(b, standing[-1] + 1)) for a, b in pairwise(sorted(ends))]
    while segments:
        first, end = segments.pop()
        cycle = longest_cycle(kinds[first:end])
        if cycle is None:
            continue
        start = first + cycle.start
        stop = start + cycle.count * cycle.length
        one = _iterations_of_one(places, stop, cycle.length)
        if not one or one * cycle.count * LEAST_SHARE < kept:
            continue
        found.append(_Repeat(stop - cycle.length, stop, -(-left_out // one)))
        segments += [(first, start), (stop, end)]
    return sorted(found, key=lambda repeat: -repeat.start)


def _iterations_of_one(places: Sequence[int | None], stop: int, length: int) -> int:
    """How many iterations the cycle covers that ends at `stop`, by its distance to the one before; 0 if it varies."""
    pairs = zip(places[stop - 2 * length : stop - length], places[stop - length : stop], strict=True)
    covered = {abs(later - earlier) for earlier, later in pairs if earlier is not None and later is not None}
    return covered.pop() if len(covered) == 1 else 0


def _all_operators(rows: Sequence[Operator], known: Iterations, left_out: int) -> list[Operator]:
    def repeats_of(rows: Sequence[Operator]) -> list[_Repeat]:
        kinds = [(op.target, op.operator_class, op.shape, op.dtype, op.cost) for op in rows]
        return _repeats(kinds, [known.get(op.name) for op in rows], left_out)

    repeats = repeats_of(rows)
    if all(op.is_view for repeat in repeats for op in rows[repeat.start : repeat.end]):
        # The views of all iterations are made together, as those of the columns of one tensor are.
        rows = [op for op in rows if not op.is_view]
        repeats = repeats_of(rows)
    if not repeats:
        raise Irregular("the kept iterations show no cycle")
    for repeat in repeats:
        rows = _operators_repeated(rows, repeat)
    return list(rows)


def _operators_repeated(rows: Sequence[Operator], repeat: _Repeat) -> list[Operator]:
    cycle, before = rows[repeat.start : repeat.end], rows[repeat.start - repeat.length : repeat.start]
    place = {op.name: (j, -1) for j, op in enumerate(before)} | {op.name: (j, 0) for j, op in enumerate(cycle)}
    step = cycle[0].index - before[0].index

    def name(j: int, copy: int) -> str:
        return before[j].name if copy < 0 else cycle[j].name if not copy else f"{cycle[j].name}.{copy}"

    def moved(op: Operator, copy: int, suffix: str) -> Operator:
        reads = tuple(name(place[n][0], place[n][1] + copy) if n in place else n for n in op.inputs)
        named = op.name + suffix
        return _changed(op, name=named, region=op.region and named, index=op.index + copy * step, inputs=reads)

    return _repeated(rows, repeat, moved)


def _repeated(rows: Sequence[Row], repeat: _Repeat, moved: Callable[[Row, int, str], Row]) -> list[Row]:
    """`rows` with the copies of the cycle behind it. `moved` gives a row of copy number n, with a suffix for its name,
    and the rows behind the copies, with the number of copies and no suffix."""
    cycle, numbers = rows[repeat.start : repeat.end], range(1, repeat.times + 1)
    copies = [moved(row, number, f".{number}") for number in numbers for row in cycle]
    later = [moved(row, repeat.times, "") for row in rows[repeat.end :]]
    return list(rows[: repeat.end]) + copies + later


def _all_points(points: Sequence[MemoryPoint], known: Iterations, left_out: int, saved: int) -> list[MemoryPoint]:
    """Live memory of the whole program; empty if it does not change by the same amount in each cycle.

    `saved` bytes of the iterations left out are alive from the start: what forward leaves to backward.
    """
    if not points:
        return []
    live = [point.live_bytes for point in points]
    changes = [now - before for now, before in zip(live, [0, *live[:-1]], strict=True)]
    kinds = [(_NUMBER.sub("", point.name), change) for point, change in zip(points, changes, strict=True)]
    repeats = _repeats(kinds, [known.get(point.name) for point in points], left_out)
    for repeat in repeats:
        points = _points_repeated(points, repeat)
    if not repeats:
        return []
    return [replace(point, live_bytes=point.live_bytes + saved) for point in points] if saved else list(points)


def _points_repeated(points: Sequence[MemoryPoint], repeat: _Repeat) -> list[MemoryPoint]:
    growth = points[repeat.end - 1].live_bytes - points[repeat.start - 1].live_bytes

    def moved(point: MemoryPoint, copy: int, suffix: str) -> MemoryPoint:
        index, live = point.index + copy * repeat.length, point.live_bytes + copy * growth
        return _changed(point, name=point.name + suffix, index=index, live_bytes=live)

    return _repeated(points, repeat, moved)


def _all_decisions(decisions: Sequence[Decision], known: Iterations, left_out: int) -> list[Decision]:
    """The decisions of the whole program; those of the kept part alone if they show no cycle."""
    kinds = [(x.verdict, _NUMBER.sub("", x.reason), x.bytes_saved, x.passed_by, x.source) for x in decisions]
    for repeat in _repeats(kinds, [known.get(x.consumer) for x in decisions], left_out):
        decisions = _repeated(decisions, repeat, _decision_of_copy)
    return list(decisions)


def _decision_of_copy(row: Decision, _: int, suffix: str) -> Decision:
    return _changed(row, producer=row.producer + suffix, consumer=row.consumer + suffix)


def _changed(row: Row, **changes: object) -> Row:
    """`dataclasses.replace` of a row, in a quarter of the time: programs have a hundred thousand."""
    changed = object.__new__(type(row))
    changed.__dict__.update(row.__dict__, **changes)
    return changed


_NUMBER = re.compile(r"\d+")
"""The number that distinguishes the names of equal operators."""
