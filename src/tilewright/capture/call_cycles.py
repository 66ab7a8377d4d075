"""Folds a program whose calls repeat: the same graph with fewer iterations, and the number of those left out.

    35,009 calls: 4, then 5,000 × 7, then 5   →   a graph of 4 + 85 × 7 + 5 calls; 4,915 iterations left out

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
"""Key in a node's `custom` metadata, which AOTAutograd hands on to the operators that it makes of a call."""


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


@dataclass
class Folded(Traced):
    """A program with `left_out` of the iterations of its longest cycle left out."""

    cycle: Cycle
    left_out: int
    calls: int
    """Calls of the whole program."""
    place: str
    """The user's line at which an iteration begins."""

    @property
    def kept(self) -> int:
        return self.cycle.count - self.left_out


def folded(traced: Traced, making: Callable[[], Any]) -> Folded | None:
    """The program with equal iterations left out; None where it is short or does not repeat.

    Within `making` tensors are made like the program's.
    """
    calls = _calls(traced.module.graph)
    if len(calls) < FEWEST_CALLS or (found := longest_cycle([_kind(call) for call in calls])) is None:
        return None
    if (cycle := _steady(calls, found)) is None:
        return None
    early = max(FEWEST_KEPT, KEPT_CALLS // cycle.length)
    left_out = cycle.count - early - LATE
    if left_out * cycle.length * 2 < len(calls):
        return None
    with making():
        return _shortened(traced, cycle, early, left_out)


def _calls(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op not in ("placeholder", "output")]


def _kind(call: fx.Node) -> Hashable:
    values = call.meta.get("example_value")
    specs = [
        (tuple(x.shape), x.stride(), x.dtype, x.requires_grad) if isinstance(x, torch.Tensor) else type(x)
        for x in (values if isinstance(values, (tuple, list)) else [values])
    ]
    return call.op, call.target, tuple(specs), user_line(call.meta.get("stack_trace") or "")


def longest_cycle(kinds: Sequence[Hashable]) -> Cycle | None:
    """The shortest cycle of equal kinds that covers nearly as much of the sequence as any does; None without one.

    >>> longest_cycle("zababac")
    Cycle(start=1, length=2, count=2)
    """
    numbers: dict[Hashable, int] = {}
    kind = np.array([numbers.setdefault(each, len(numbers)) for each in kinds])
    found: list[Cycle] = []
    for length in range(1, min(LONGEST_CYCLE, len(kinds) // 2) + 1):
        start, equal = _longest_run(kind[length:] == kind[:-length])
        if equal >= length:
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


def _shortened(traced: Traced, cycle: Cycle, early: int, left_out: int) -> Folded:
    """The program with `early` iterations, and those behind what is left out."""
    module = copied(traced.module)
    graph, calls = module.graph, _calls(module.graph)
    places = {call: place for place, call in enumerate(calls)}
    gap = range(cycle.start + early * cycle.length, cycle.start + (early + left_out) * cycle.length)
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
                    held[value] = graph.placeholder(f"left_out_{len(given)}")
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
            call.meta["custom"] = {**call.meta.get("custom", {}), ITERATION: iteration}
    results = [x for x in graph.output_node().all_input_nodes if places.get(x, -1) not in gap]
    graph.output_node().args = (tuple(results),)
    for place in reversed(gap):
        graph.erase_node(calls[place])
    for node in [node for node in given if not node.users]:
        graph.erase_node(node)
        del given[node]
    inputs = {at: traced.inputs[numbers[x]] for at, x in enumerate(given) if numbers.get(x) in traced.inputs}
    place_text = user_line(calls[cycle.start].meta.get("stack_trace") or "") or "an unknown line"
    line = place_text.split(": ")[0]
    return Folded(module, list(given.values()), inputs, cycle, left_out, len(calls), line)
