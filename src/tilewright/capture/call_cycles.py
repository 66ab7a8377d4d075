"""Folds a program whose calls repeat: the same graph with fewer iterations, and the number of those left out.

    35,009 calls: 4, then 5,000 × 7, then 5   →   a graph of 4 + 85 × 7 + 5 calls; 4,915 iterations left out

The iterations left out must read what their neighbours read: values of equally distant iterations, the same values from
before the loop, or others of the same shape (each layer's weights, each step's column). A later call that reads a value
of an iteration left out, as `torch.stack` of all steps does, gets an input in its place.
"""

from __future__ import annotations

import linecache
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import fx
from torch.fx.node import map_aggregate

from tilewright.capture.function_calls import FunctionCall, FunctionCalls, Leaf, Value, attribute_of

FEWEST_CALLS = 1000
"""Programs of fewer calls are captured whole."""
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


@dataclass(frozen=True)
class Folded:
    """A program with `left_out` of the iterations of its longest cycle left out."""

    module: fx.GraphModule
    examples: list[torch.Tensor]
    inputs: dict[int, int]
    """The placeholders that are inputs of the program, and which."""
    cycle: Cycle
    left_out: int
    calls: int
    """Calls of the whole program."""
    place: str
    """The user's line at which an iteration begins."""

    @property
    def kept(self) -> int:
        return self.cycle.count - self.left_out


def folded(program: FunctionCalls, inputs: Sequence[torch.Tensor]) -> Folded | None:
    """The program with equal iterations left out; None where it is short or does not repeat."""
    calls = program.calls
    if len(calls) < FEWEST_CALLS or (cycle := _cycle(calls)) is None:
        return None
    early = max(FEWEST_KEPT, KEPT_CALLS // cycle.length)
    left_out = cycle.count - early - LATE
    if left_out * cycle.length * 2 < len(calls):
        return None
    return _Short(program, inputs, cycle, early, left_out).folded()


def _cycle(calls: Sequence[FunctionCall]) -> Cycle | None:
    cycle = longest_cycle([(call.function, call.specs, call.place) for call in calls])
    return None if cycle is None else _steady(calls, cycle)


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


def _steady(calls: Sequence[FunctionCall], cycle: Cycle) -> Cycle | None:
    """The longest part of a cycle in which each iteration reads as the one before does."""
    same = [
        all(_reads_alike(calls[i - cycle.length], calls[i], cycle) for i in range(first, first + cycle.length))
        for first in range(cycle.start + cycle.length, cycle.start + cycle.length * cycle.count, cycle.length)
    ]
    start, length = _longest_run(np.array(same, dtype=bool))
    return Cycle(cycle.start + start * cycle.length, cycle.length, length + 1) if length else None


def _reads_alike(before: FunctionCall, after: FunctionCall, cycle: Cycle) -> bool:
    def alike(x: Any, y: Any) -> bool:
        match x, y:
            case Value(), Value():
                if y.call >= cycle.start and y.call - cycle.length >= cycle.start:
                    return x == Value(y.call - cycle.length, y.place)
                return y.call < cycle.start and x.call < cycle.start
            case Leaf(), Leaf():
                return True
            case (tuple(), tuple()) | (list(), list()):
                return len(x) == len(y) and all(map(alike, x, y))
            case dict(), dict():
                return x.keys() == y.keys() and all(alike(x[name], y[name]) for name in x)
            case slice(), slice():
                return alike((x.start, x.stop, x.step), (y.start, y.stop, y.step))
        # The index of a column, the scale of a layer: numbers may differ, as the results have equal shapes.
        return type(x) is type(y) and (x == y or type(x) in (int, float))

    return alike(before.args, after.args) and alike(before.kwargs, after.kwargs)


class _Short:
    """Builds the graph of the iterations kept: `early` of them, then those after what is left out."""

    def __init__(
        self, program: FunctionCalls, inputs: Sequence[torch.Tensor], cycle: Cycle, early: int, left_out: int
    ) -> None:
        self.program = program
        self.cycle = cycle
        self.left_out = left_out
        self.positions = {id(x): i for i, x in enumerate(inputs)}
        self.gap = range(cycle.start + early * cycle.length, cycle.start + (early + left_out) * cycle.length)
        self.end = cycle.start + cycle.count * cycle.length
        self.graph = fx.Graph()
        self.examples: list[torch.Tensor] = []
        self.inputs: list[fx.Node] = []
        self.input_places: dict[int, int] = {}
        self.leaves: dict[int, fx.Node] = {}
        self.nodes: dict[int, fx.Node] = {}
        self.items: dict[Value, fx.Node] = {}

    def folded(self) -> Folded:
        calls = self.program.calls
        for number, call in enumerate(calls):
            if number not in self.gap:
                self._add(number, call)
        results = [x for x in self.program.results if isinstance(x, Leaf) or x.call not in self.gap]
        self.graph.output(tuple(dict.fromkeys(self._operand(x, len(calls)) for x in results)))
        self.graph.lint()
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        file, line, _ = calls[self.cycle.start].place
        place = f"{Path(file).name}:{line}"
        return Folded(module, self.examples, self.input_places, self.cycle, self.left_out, len(calls), place)

    def _add(self, number: int, call: FunctionCall) -> None:
        args = self._operands(call.args, number)
        kwargs = self._operands(call.kwargs, number)
        name = getattr(call.function, "__name__", "")
        if name == "__get__":
            node = self.graph.call_function(getattr, (args[0], attribute_of(call.function)))
        elif name == "__getitem__":
            node = self.graph.call_function(operator.getitem, args)
        elif name == "__setitem__":
            node = self.graph.call_function(operator.setitem, args)
        elif getattr(torch.Tensor, name, None) is call.function:
            node = self.graph.call_method(name, args, kwargs)
        else:
            node = self.graph.call_function(call.function, args, kwargs)
        self._describe(node, number, call)
        self.nodes[number] = node

    def _describe(self, node: fx.Node, number: int, call: FunctionCall) -> None:
        file, line, function = call.place
        code = linecache.getline(file, line).strip()
        node.meta["stack_trace"] = f'  File "{file}", line {line}, in {function}\n    {code}\n'
        if self.cycle.start <= number < self.end:
            kept = number if number < self.gap.start else number - len(self.gap)
            node.meta["custom"] = {ITERATION: (kept - self.cycle.start) // self.cycle.length}

    def _operands(self, x: Any, reader: int) -> Any:
        return map_aggregate(x, lambda y: self._operand(y, reader) if isinstance(y, (Value, Leaf)) else y)

    def _operand(self, x: Value | Leaf, reader: int) -> fx.Node:
        if isinstance(x, Leaf):
            return self._leaf(x)
        in_late_iteration = self.gap.stop <= reader < self.end
        if in_late_iteration and self.cycle.start <= x.call < self.gap.stop:
            # The value at the same distance before the gap.
            x = Value(x.call - len(self.gap), x.place)
        if x in self.items:
            return self.items[x]
        call = self.program.calls[x.call]
        if x.call in self.gap:
            spec = call.specs[max(x.place, 0)]
            assert spec is not None
            node = self._input(f"left_out_{len(self.inputs)}", torch.empty_strided(spec[0], spec[1], dtype=spec[2]))
        elif x.place < 0:
            node = self.nodes[x.call]
        else:
            with self.graph.inserting_after(self.nodes[x.call]):
                node = self.graph.call_function(operator.getitem, (self.nodes[x.call], x.place))
            self._describe(node, x.call, call)
        self.items[x] = node
        return node

    def _leaf(self, x: Leaf) -> fx.Node:
        if x.number not in self.leaves:
            tensor = self.program.leaves[x.number]
            position = self.positions.get(id(tensor))
            if position is not None:
                self.input_places[len(self.inputs)] = position
            name = f"l_parameter_{x.number}_" if position is None else f"l_inputs_{position}_"
            self.leaves[x.number] = self._input(name, tensor)
        return self.leaves[x.number]

    def _input(self, name: str, tensor: torch.Tensor) -> fx.Node:
        """A new placeholder after the existing ones."""
        first = next(iter(self.graph.nodes), None)
        behind = self.inputs[-1] if self.inputs else None
        place = self.graph.inserting_after(behind) if behind else self.graph.inserting_before(first)
        with place:
            node = self.graph.placeholder(name)
        self.inputs.append(node)
        self.examples.append(tensor)
        return node
