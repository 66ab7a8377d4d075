"""Decides which proposed fusions stay: by prediction or, if that is too close, by a race on this machine.

The fusion pass assumes that moving fewer bytes is faster. If the target measures, a region whose predicted time is
close to that of its operators one by one is raced against them, and the outcome is kept: every later compilation of the
same nest, in any process, follows it. A region that lost is split into its operators, and its decisions become "tried
and lost".
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from tilewright.choose.chooser import is_faster
from tilewright.cost.kinds import region_work
from tilewright.cost.work import is_close
from tilewright.emit.cpp import translation_unit
from tilewright.emit.source import source_of
from tilewright.hardware.target import Target
from tilewright.kernels.dropout_add.stream import draw_stream
from tilewright.launch.race import Alternatives, race_key, run
from tilewright.loops.nest import describe, nameless
from tilewright.passes.fusion import Fusion, Region, split_region
from tilewright.passes.units import is_view
from tilewright.records import outcomes
from tilewright.records.outcomes import Outcome
from tilewright.records.program import Decision
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


MADE_FROM = ("emit", "loops", "runtime/compiler.py")


def settle(fusion: Fusion, target: Target) -> Fusion:
    """`fusion` with the regions that lost a race split into their operators."""
    # Whose kernels run on a device of this machine.
    here = [r for r in fusion.regions if r.device.type == "cuda" or r.language == "c++"]
    several = [r for r in here if len(r.members) > 1]
    if target.measures:
        unknown = [(r, parts) for r in several if _kept(r) is None and (parts := split_region(r)) is not None]
        close = [(region, parts) for region, parts in unknown if _is_close(region, parts, target)]
        for (region, _), outcome in zip(close, race_regions(close) if close else [], strict=True):
            outcomes.keep(_key(region), outcome)
    raced = {region: known for region in several if (known := _kept(region)) is not None}
    return replace(
        fusion,
        regions=[part for region in fusion.regions for part in _follow(region, raced.get(region))],
        decisions=[_annotate(decision, raced) for decision in fusion.decisions],
    )


def _is_close(region: Region, parts: Sequence[Region], target: Target) -> bool:
    return is_close([region_work(region.lowered)], [region_work(part.lowered) for part in parts], target.profile)


def _stays_fused(outcome: Outcome) -> bool:
    return is_faster(outcome.us(FUSED), outcome.us(APART), raced=True)


def _follow(region: Region, outcome: Outcome | None) -> Sequence[Region]:
    if outcome is None or _stays_fused(outcome):
        return [region]
    return split_region(region) or [region]


def _annotate(decision: Decision, raced: dict[Region, Outcome]) -> Decision:
    for region, outcome in raced.items():
        names = {node.name for node in region.members}
        if decision.verdict == "taken" and {decision.producer, decision.consumer} <= names:
            fused_us, apart_us = outcome.times_us[FUSED], outcome.times_us.get(APART)
            if apart_us is None or _stays_fused(outcome):
                return replace(decision, measured_us=fused_us)
            reason = f"one kernel took {fused_us:.0f} µs, one each {apart_us:.0f} µs"
            return replace(decision, verdict="tried and lost", reason=reason, bytes_saved=0, measured_us=fused_us)
    return decision


def _kept(region: Region) -> Outcome | None:
    return outcomes.lookup(_key(region))


def _key(region: Region) -> str:
    """The key of a race of the nest, whatever its names."""
    return race_key(("region", describe(nameless(region.lowered.nest))), region.device, MADE_FROM)
