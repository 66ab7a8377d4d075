"""One alternative against another on this machine: a fused kernel, or its operators one by one."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilewright.emit.cpp import emit_cpp, translation_unit
from tilewright.measure.timing.benchmark import benchmark
from tilewright.passes.draws import draw_stream
from tilewright.passes.fusion import Region
from tilewright.runtime.compiler import load
from tilewright.runtime.executable import CallStep, KernelStep, Slot, Slots, TensorSpec

TRIAL_SECONDS = 0.4


@dataclass(frozen=True)
class Trial:
    """Median microseconds of a region as one kernel, and as one kernel an operator."""

    fused_us: float
    separate_us: float

    @property
    def fusion_wins(self) -> bool:
        """A tie goes to the fused kernel, which needs less memory."""
        return self.fused_us <= self.separate_us * 1.02


def race(pairs: Sequence[tuple[Region, Sequence[Region]]]) -> list[Trial]:
    """Time each region against its parts, interleaved, on random inputs; one compiler call for all."""
    sources = [emit_cpp(r.lowered.nest) for fused, parts in pairs for r in (fused, *parts)]
    library = load(translation_unit(list(dict.fromkeys(sources))))
    return [_race(library, fused, parts) for fused, parts in pairs]


def _race(library: ctypes.CDLL, fused: Region, parts: Sequence[Region]) -> Trial:
    generator = torch.Generator().manual_seed(0)
    values = {node: _random(node, generator) for node in fused.lowered.inputs}
    nest = fused.lowered.nest
    for step in nest.steps:
        if step.name == "draw" and step.access:
            values[fused.lowered.inputs[step.access.buffer]] = draw_stream([0])
    whole, split = _Program(library, [fused], values), _Program(library, parts, values)
    timings = benchmark({"fused": whole.run, "separate": split.run}, max_seconds=TRIAL_SECONDS, min_repeats=5)
    return Trial(timings["fused"].median_us, timings["separate"].median_us)


class _Program:
    """Kernels in order over shared slots."""

    def __init__(self, library: ctypes.CDLL, regions: Sequence[Region], values: dict[fx.Node, torch.Tensor]) -> None:
        self.slots = {node: i for i, node in enumerate(values)}
        self.steps: list[KernelStep | CallStep] = []
        for region in regions:
            lowered = region.lowered
            function: Any = getattr(library, lowered.nest.name)
            function.argtypes, function.restype = (ctypes.c_void_p, ctypes.c_int), None
            inputs = tuple(self._slot(n) for n in lowered.inputs)
            for node in lowered.outputs:
                self.slots.setdefault(node, len(self.slots))
            outputs = tuple((self.slots[n], TensorSpec.of(n.meta["val"]), None) for n in lowered.outputs)
            self.steps.append(KernelStep(lowered.nest.name, function, inputs, outputs))
        self.filled: Slots = [*values.values(), *([None] * (len(self.slots) - len(values)))]

    def _slot(self, node: fx.Node) -> int:
        """Where the value of `node` is; a view of a part's result is made first."""
        if node not in self.slots:
            args: Any = tuple(Slot(self._slot(a)) if isinstance(a, fx.Node) else a for a in node.args)
            self.slots[node] = len(self.slots)
            target: Any = node.target
            self.steps.append(CallStep(node.name, target, args, dict(node.kwargs), self.slots[node]))
        return self.slots[node]

    def run(self) -> None:
        slots = list(self.filled)
        for step in self.steps:
            step.run(slots)


def _random(node: fx.Node, generator: torch.Generator) -> torch.Tensor:
    meta = node.meta["val"]
    tensor = torch.empty_strided(meta.shape, meta.stride(), dtype=meta.dtype)
    if meta.dtype.is_floating_point:
        return tensor.normal_(generator=generator)
    return tensor.random_(0, 2, generator=generator)
