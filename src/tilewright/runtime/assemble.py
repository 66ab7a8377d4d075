"""From scheduled units to an executable: slots, lifetimes, storage taken over in place, `out=` calls."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilewright.loops.nest import Nest
from tilewright.passes.fusion import Region
from tilewright.passes.schedule import Unit
from tilewright.passes.units import behind_views, is_view
from tilewright.runtime.executable import CallStep, Executable, KernelStep, Slot, TensorSpec

aten = torch.ops.aten
OUT_VARIANTS: dict[object, Any] = {
    aten.mm.default: aten.mm.out,
    aten.bmm.default: aten.bmm.out,
    aten.addmm.default: aten.addmm.out,
    aten.baddbmm.default: aten.baddbmm.out,
}
"""Library calls that can write into pooled storage."""


@dataclass
class Scheduled:
    """A graph ready to run: its units in order."""

    graph: fx.Graph
    units: list[Unit]


def assemble(scheduled: Scheduled, library: ctypes.CDLL | None) -> Executable:
    """The executable of one graph; `library` holds the kernels of its regions."""
    return _Assembler(scheduled, library).build()


class _Assembler:
    def __init__(self, scheduled: Scheduled, library: ctypes.CDLL | None) -> None:
        self.graph = scheduled.graph
        self.units = scheduled.units
        self.library = library
        self.slots: dict[fx.Node, int] = {}
        self.output = self.graph.output_node()
        self.last_use = self._last_uses()

    def build(self) -> Executable:
        inputs = [(self._slot(n), _input_spec(n)) for n in self.graph.nodes if n.op == "placeholder"]
        steps = [self._step(position, unit) for position, unit in enumerate(self.units)]
        for position, step in enumerate(steps):
            step.frees = tuple(
                self.slots[n] for n, last in self.last_use.items() if last == position and n in self.slots
            )
        results = [self._argument(a) for a in self.output.args[0]]  # type: ignore[union-attr]
        return Executable(steps, len(self.slots), inputs, results)

    def _slot(self, node: fx.Node) -> int:
        return self.slots.setdefault(node, len(self.slots))

    def _reads(self, unit: Unit) -> Sequence[fx.Node]:
        return unit.lowered.inputs if isinstance(unit, Region) else unit.all_input_nodes

    def _last_uses(self) -> dict[fx.Node, int]:
        last: dict[fx.Node, int] = {}
        for position, unit in enumerate(self.units):
            for node in self._reads(unit):
                last[node] = position
        for node in self.output.all_input_nodes:
            last[node] = len(self.units)
        return last

    def _step(self, position: int, unit: Unit) -> KernelStep | CallStep:
        if isinstance(unit, Region):
            return self._kernel(position, unit)
        args = tuple(self._argument(a) for a in unit.args)
        kwargs = {k: self._argument(v) for k, v in unit.kwargs.items()}
        target: Any = unit.target
        meta: Any = unit.meta.get("val")
        on_cpu = isinstance(meta, torch.Tensor) and meta.device.type == "cpu" and meta.numel() > 0
        if on_cpu and target in OUT_VARIANTS and not kwargs and meta.is_contiguous():
            return CallStep(
                unit.name, OUT_VARIANTS[target], args, {}, self._slot(unit), out=TensorSpec.of(meta)
            )
        # A view of a tensor that lies as the graph says lies as the graph says.
        spec = TensorSpec.of(meta) if on_cpu and not is_view(unit) else None
        return CallStep(unit.name, target, args, kwargs, self._slot(unit), spec=spec)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return Slot(self._slot(value))
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(v) for v in value)
        return value

    def _kernel(self, position: int, region: Region) -> KernelStep:
        assert self.library is not None
        function = getattr(self.library, region.lowered.nest.name)
        function.restype = None
        function.argtypes = (ctypes.c_void_p, ctypes.c_int)
        inputs = tuple(self._slot(n) for n in region.lowered.inputs)
        outputs, taken = [], set[fx.Node]()
        for number, node in enumerate(region.lowered.outputs):
            over = self._takes_over(position, region, number, taken)
            if over is not None:
                taken.add(over)
            spec = TensorSpec.of(node.meta["val"])
            outputs.append((self._slot(node), spec, None if over is None else self._slot(over)))
        return KernelStep(region.lowered.nest.name, function, inputs, tuple(outputs))

    def _takes_over(self, position: int, region: Region, number: int, taken: set[fx.Node]) -> fx.Node | None:
        """An operand that dies here, that this graph computed, and that output `number` can overwrite."""
        nest = region.lowered.nest
        result = region.lowered.outputs[number].meta["val"]
        for index, node in enumerate(region.lowered.inputs):
            meta = node.meta["val"]
            same = (
                meta.dtype == result.dtype and meta.stride() == result.stride() and meta.shape == result.shape
            )
            if not same or node in taken or self.last_use[node] != position or not meta.is_contiguous():
                continue
            if self._owned(node) and writes_after_reads(nest, index, number):
                return node
        return None

    def _owned(self, node: fx.Node) -> bool:
        """Whether this graph made the storage of `node` and nothing else shows it."""
        if node.op == "placeholder" or is_view(node) or any(is_view(u) for u in node.users):
            return False
        return behind_views(node) is node and not self._may_alias(node)

    def _may_alias(self, node: fx.Node) -> bool:
        """Library calls may hand back an operand; kernels and `out=` calls never do."""
        in_region = any(isinstance(u, Region) and node in u.lowered.outputs for u in self.units)
        return not in_region and node.target not in OUT_VARIANTS


def _input_spec(node: fx.Node) -> TensorSpec | None:
    meta = node.meta.get("val")
    if isinstance(meta, torch.Tensor) and meta.layout is torch.strided:
        return TensorSpec.of(meta)
    return None


def writes_after_reads(nest: Nest, source: int, target: int) -> bool:
    """Whether output `target` may share storage with input `source`: each element is read for the
    last time in the pass over the columns that writes it."""
    stores = [s for s in nest.stores if s.access.buffer == len(nest.inputs) + target]
    loads = [s for s in nest.steps if s.access and s.access.buffer == source]
    if any(load.access and load.access.strides != stores[0].access.strides for load in loads):
        return False
    if any(s.where == "after" or s.name == "reduce_rows" for s in (nest.steps[x.value] for x in stores)):
        return False
    return nest.steps[stores[0].value].stage == nest.stages - 1 or nest.stages == 1
