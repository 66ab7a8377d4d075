"""Races a region as one kernel against one kernel for each of its operators, on its own device."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import fx

from tilewright.emit.cpp import translation_unit
from tilewright.emit.source import source_of
from tilewright.graph.pytorch_state import in_real_tensors
from tilewright.measure.timing.contest import contest
from tilewright.passes.fusion import Region
from tilewright.passes.random.draws import draw_stream
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
    return [_race(library, fused, parts) for fused, parts in pairs]


def _race(library: ctypes.CDLL | None, fused: Region, parts: Sequence[Region]) -> Outcome:
    device = fused.device
    generators: dict[torch.device, torch.Generator] = {}
    with in_real_tensors(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        values = {node: random_like(node.meta["val"], generators) for node in fused.lowered.inputs}
        nest = fused.lowered.nest
        for step in nest.steps:
            if step.name == "draw" and step.access and step.philox is None:
                values[fused.lowered.inputs[step.access.buffer]] = draw_stream([0])
        results = fused.lowered.outputs
        whole, split = _Program(library, [fused], values, results), _Program(library, parts, values, results)
        return contest({FUSED: whole.run, APART: split.run}, device)


class _Program:
    """The kernels of some regions, run in order over a list of slots."""

    def __init__(
        self,
        library: ctypes.CDLL | None,
        regions: Sequence[Region],
        values: dict[fx.Node, torch.Tensor],
        results: Sequence[fx.Node],
    ) -> None:
        self.slots = {node: i for i, node in enumerate(values)}
        self.steps: list[Step] = []
        for region in regions:
            inputs = tuple(self._slot(n) for n in region.lowered.inputs)
            for node in region.lowered.outputs:
                self.slots.setdefault(node, len(self.slots))
            outputs = tuple((self.slots[n], layout_of(n.meta["val"]), None) for n in region.lowered.outputs)
            self.steps.append(kernel_step(region, source_of(region.lowered), library, inputs, outputs))
        self.filled: Slots = [*values.values(), *([None] * (len(self.slots) - len(values)))]
        self.results = [self._slot(node) for node in results]

    def _slot(self, node: fx.Node) -> int:
        """The slot of `node`; for a view of a part's result, first add the step that makes it."""
        if node not in self.slots:
            args: Any = tuple(Slot(self._slot(a)) if isinstance(a, fx.Node) else a for a in node.args)
            self.slots[node] = len(self.slots)
            target: Any = node.target
            self.steps.append(CallStep(node.name, self.slots[node], target, args, dict(node.kwargs)))
        return self.slots[node]

    def run(self) -> list[torch.Tensor]:
        slots = list(self.filled)
        for step in self.steps:
            step.run(slots)
        return [slots[place] for place in self.results]
