"""Folds a program whose calls repeat: the same graph with fewer iterations, and the number of those left out.

    35,009 calls: 4, then 5,000 × 7, then 5   →   a graph of 4 + 85 × 7 + 5 calls; 4,915 iterations left out

Each loop of a program is shortened so, as those of the layers of an LSTM, the longest first.

The iterations left out must read what their neighbours read: values of equally distant iterations, the same values from
before the loop, or inputs (each layer's weights). A later call that reads a value of an iteration left out, as
`torch.stack` of all steps does, gets an input in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import fx

from tilewright.graph.canonical import example
from tilewright.graph.source import user_line
from tilewright.graph.undefined import copied

FEWEST_CALLS = 1000
"""Programs of fewer calls are planned whole."""
KEPT_CALLS = 450
"""The number of repeated calls that are kept, about: more than the largest region holds, and quick to plan."""
FEWEST_KEPT = 8
LONGEST_CYCLE = 3000
NEARLY = 0.95
LATE = 2
"""Iterations kept after those left out: calls after the loop may read the last but one."""
ITERATION = "iteration"
"""Key in a node's `custom` metadata, which AOTAutograd hands on to the operators that it makes of a call: the number of
the loop, and that of the iteration."""


@dataclass(frozen=True)
class Cycle:
    """`count` iterations of `length` calls, the first of which is call `start`."""

    start: int
    length: int
    count: int


@dataclass
class Traced:
    """A program as Dynamo captured it."""

    module: fx.GraphModule
    examples: list[Any]
    """Of each placeholder."""
    inputs: dict[int, int]
    """The placeholders that are inputs of the program, and which."""


@dataclass(frozen=True)
class Loop:
    """A cycle, and how many of its iterations are left out."""

    cycle: Cycle
    left_out: int
    place: str
    """The user's line at which an iteration begins."""

    @property
    def kept(self) -> int:
        return self.cycle.count - self.left_out


@dataclass
class Folded(Traced):
    """A program without most of the iterations of its loops."""

    loops: Sequence[Loop]
    calls: int
    """Calls of the whole program."""


def folded(traced: Traced, making: Callable[[], Any]) -> Folded | None:
    """The program with equal iterations left out; None where it is short or does not repeat.

    Within `making` tensors are made like the program's.
    """
    whole, loops = len(_calls(traced.module.graph)), list[Loop]()
    while len(calls := _calls(traced.module.graph)) >= FEWEST_CALLS:
        found = longest_cycle([_kind(call) for call in calls], _kept)
        if found is None or (cycle := _steady(calls, found)) is None or cycle.count <= _kept(cycle.length):
            break
        place = user_line(calls[cycle.start].meta.get("stack_trace") or "") or "an unknown line"
        loop = Loop(cycle, cycle.count - _kept(cycle.length), place.split(": ")[0])
        with making():
            traced = _shortened(traced, loop, len(loops))
        loops.append(loop)
    if not loops or 2 * len(calls) > whole:
        return None
    return Folded(traced.module, traced.examples, traced.inputs, loops, whole)


def _kept(length: int) -> int:
    """The number of iterations of `length` calls that are kept."""
    return max(FEWEST_KEPT, KEPT_CALLS // length) + LATE


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def _kind(call: fx.Node) -> Hashable:
    values = call.meta.get("example_value")
    specs = [
        (tuple(x.shape), x.stride(), x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else type(x)
        for x in (values if isinstance(values, (tuple, list)) else [values])
    ]
    return call.op, call.target, tuple(specs), user_line(call.meta.get("stack_trace") or "")


def longest_cycle(kinds: Sequence[Hashable], fewest: Callable[[int], int] = lambda _: 1) -> Cycle | None:
    """The shortest cycle of equal kinds that covers nearly as much of the sequence as any does; None without one.

    It has more iterations than `fewest` says for its length.

    >>> longest_cycle("zababac")
    Cycle(start=1, length=2, count=2)
    """
    numbers: dict[Hashable, int] = {}
    kind = np.array([numbers.setdefault(each, len(numbers)) for each in kinds])
    found: list[Cycle] = []
    for length in range(1, min(LONGEST_CYCLE, len(kinds) // 2) + 1):
        start, equal = _longest_run(kind[length:] == kind[:-length])
        if equal >= length and equal // length + 1 > fewest(length):
            found.append(Cycle(start, length, equal // length + 1))
    most = max((cycle.length * cycle.count for cycle in found), default=0)
    return next((cycle for cycle in found if cycle.length * cycle.count >= NEARLY * most), None)


def _longest_run(true: Any) -> tuple[int, int]:
    """Start and length of the longest run of True."""
    ends = np.flatnonzero(np.diff(np.concatenate(([False], true, [False])).astype(np.int8)))
    if not len(ends):
        return 0, 0
    lengths = ends[1::2] - ends[::2]
    longest = int(np.argmax(lengths))
    return int(ends[2 * longest]), int(lengths[longest])


def _steady(calls: Sequence[fx.Node], cycle: Cycle) -> Cycle | None:
    """The longest part of a cycle in which each iteration reads as the one before does."""
    places = {call: place for place, call in enumerate(calls)}
    same = [
        all(_reads_alike(calls[i - cycle.length], calls[i], places, cycle) for i in range(at, at + cycle.length))
        for at in range(cycle.start + cycle.length, cycle.start + cycle.length * cycle.count, cycle.length)
    ]
    start, length = _longest_run(np.array(same, dtype=bool))
    return Cycle(cycle.start + start * cycle.length, cycle.length, length + 1) if length else None


def _reads_alike(before: fx.Node, after: fx.Node, places: dict[fx.Node, int], cycle: Cycle) -> bool:
    def alike(x: Any, y: Any) -> bool:
        match x, y:
            case fx.Node(), fx.Node():
                # Inputs of the program have no place.
                first, second = places.get(x, -1), places.get(y, -1)
                is_within = second - cycle.length >= cycle.start
                return first == second - cycle.length if is_within else max(first, second) < cycle.start
            case (tuple(), tuple()) | (list(), list()):
                return len(x) == len(y) and all(map(alike, x, y))
            case dict(), dict():
                return x.keys() == y.keys() and all(alike(x[name], y[name]) for name in x)
            case slice(), slice():
                return alike((x.start, x.stop, x.step), (y.start, y.stop, y.step))
        # The index of a column, the scale of a layer: numbers may differ, as the results have equal shapes.
        return type(x) is type(y) and (x == y or type(x) in (int, float))

    return alike(before.args, after.args) and alike(before.kwargs, after.kwargs)


def _shortened(traced: Traced, loop: Loop, number: int) -> Traced:
    """The program without the iterations of loop `number` that are left out, which stand before its last."""
    cycle, early = loop.cycle, loop.kept - LATE
    module = copied(traced.module)
    graph, calls = module.graph, _calls(module.graph)
    places = {call: place for place, call in enumerate(calls)}
    gap = range(cycle.start + early * cycle.length, cycle.start + (early + loop.left_out) * cycle.length)
    end = cycle.start + cycle.count * cycle.length
    given = dict(zip(graph.find_nodes(op="placeholder"), traced.examples, strict=True))
    numbers = dict(zip(given, range(len(given)), strict=True))
    held: dict[fx.Node, fx.Node] = {}

    def read_by(reader: int) -> Callable[[fx.Node], fx.Node]:
        def read(value: fx.Node) -> fx.Node:
            place = places.get(value, -1)
            if gap.stop <= reader < end and cycle.start <= place < gap.stop:
                # The value at the same distance before the gap.
                return calls[place - len(gap)]
            if place not in gap:
                return value
            if value not in held:
                like = example(value)
                assert like is not None
                with graph.inserting_after(next(reversed(given))):
                    held[value] = graph.placeholder(f"left_out_{number}_{len(given)}")
                given[held[value]] = torch.empty_strided(
                    like.shape, like.stride(), dtype=like.dtype, device=like.device
                )
                held[value].meta = dict(value.meta)
            return held[value]

        return read

    for place, call in enumerate(calls):
        if place >= gap.stop:
            read = read_by(place)
            call.args, call.kwargs = fx.map_arg(call.args, read), fx.map_arg(call.kwargs, read)
        if cycle.start <= place < end:
            kept = place if place < gap.start else place - len(gap)
            iteration = (kept - cycle.start) // cycle.length
            call.meta["custom"] = {**call.meta.get("custom", {}), ITERATION: (number, iteration)}
    results = [x for x in graph.output_node().all_input_nodes if places.get(x, -1) not in gap]
    graph.output_node().args = (tuple(results),)
    for place in reversed(gap):
        graph.erase_node(calls[place])
    for node in [node for node in given if not node.users]:
        graph.erase_node(node)
        del given[node]
    inputs = {at: traced.inputs[numbers[x]] for at, x in enumerate(given) if numbers.get(x) in traced.inputs}
    return Traced(module, list(given.values()), inputs)
