"""Races a region as one kernel against one kernel for each of its operators, on its own device."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from tilewright.emit.cpp import translation_unit
from tilewright.emit.source import source_of
from tilewright.launch.race import Alternatives, run
from tilewright.passes.fusion import Region
from tilewright.passes.random.draws import draw_stream
from tilewright.passes.units import is_view
from tilewright.records.outcomes import Outcome
from tilewright.runtime.assemble import kernel_step
from tilewright.runtime.compiler import load
from tilewright.runtime.executable import CallStep, Slot, Slots, Step, layout_of
from tilewright.runtime.stopwatch import random_like

FUSED, APART = "fused", "apart"


def race_regions(pairs: Sequence[tuple[Region, Sequence[Region]]]) -> list[Outcome]:
    """Time each region against its parts on random inputs; all C++ kernels are compiled together."""
    regions = [r for fused, parts in pairs for r in (fused, *parts) if r.language == "c++"]
    sources = dict.fromkeys(source_of(region.lowered) for region in regions)
    library = load(translation_unit(list(sources))) if sources else None
    return [run(partial(_alternatives, library, *pair), pair[0].device) for pair in pairs]


def _alternatives(library: ctypes.CDLL | None, fused: Region, parts: Sequence[Region]) -> Alternatives:
    values, programs = operands_of(fused), {FUSED: [fused], APART: parts}
    return {name: _Program(library, regions, values, fused.lowered.outputs).run for name, regions in programs.items()}


def operands_of(region: Region) -> Operands:
    """Random operands of a region's kernel; a stream of PyTorch's generator where one is drawn from."""
    values = Operands(high=min((2, *region.lowered.nest.checks)))
    for step in region.lowered.nest.steps:
        if step.name == "draw" and step.access and step.philox is None:
            values[region.lowered.inputs[step.access.buffer]] = draw_stream([0])
    return values


class Operands(dict[fx.Node, Any]):
    """The same random tensor for both programs, wherever one reads what none of its kernels computes."""

    def __init__(self, high: int = 2) -> None:
        super().__init__()
        self.high = high
        """Integers, which may be indices, are below it."""
        self.generators: dict[torch.device, torch.Generator] = {}

    def __missing__(self, node: fx.Node) -> Any:
        if isinstance(node.target, OpOverload) and is_view(node):
            # One program may read a view of what the other reads whole; their results are compared.
            args, kwargs = map_arg((node.args, node.kwargs), self.__getitem__)
            return self.setdefault(node, node.target(*args, **kwargs))
        return self.setdefault(node, random_like(node.meta["val"], self.generators, self.high))


class _Program:
    """The kernels of some regions, run in order over a list of slots."""

    def __init__(
        self, library: ctypes.CDLL | None, regions: Sequence[Region], values: Operands, results: Sequence[fx.Node]
    ) -> None:
        self.values = values
        self.slots: dict[fx.Node, int] = {}
        self.filled: Slots = []
        self.steps: list[Step] = []
        for region in regions:
            inputs = tuple(self._slot(n) for n in region.lowered.inputs)
            outputs = tuple((self._new_slot(n), layout_of(n.meta["val"]), None) for n in region.lowered.outputs)
            self.steps.append(kernel_step(region, source_of(region.lowered), library, inputs, outputs))
        self.results = [self._slot(node) for node in results]

    def _new_slot(self, node: fx.Node, value: Any = None) -> int:
        self.filled.append(value)
        return self.slots.setdefault(node, len(self.filled) - 1)

    def _slot(self, node: fx.Node) -> int:
        """The slot of `node`; for a view of a part's result, first add the step that makes it."""
        if node in self.slots:
            return self.slots[node]
        if node in self.values or not self._is_computed(node):
            return self._new_slot(node, self.values[node])
        args: Any = tuple(Slot(self._slot(a)) if isinstance(a, fx.Node) else a for a in node.args)
        target: Any = node.target
        slot = self._new_slot(node)
        self.steps.append(CallStep(node.name, slot, target, args, dict(node.kwargs)))
        return slot

    def _is_computed(self, node: fx.Node) -> bool:
        """Whether a kernel of this program computes what `node` is, or is a view of."""
        return node in self.slots or (is_view(node) and any(map(self._is_computed, node.all_input_nodes)))

    def run(self) -> list[torch.Tensor]:
        slots = list(self.filled)
        for step in self.steps:
            step.run(slots)
        return [slots[place] for place in self.results]
