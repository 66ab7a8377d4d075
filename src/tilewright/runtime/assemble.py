"""From scheduled units to an executable: slots, lifetimes, storage taken over in place, `out=` calls."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from tilewright.emit.source import language_of
from tilewright.loops.nest import Nest
from tilewright.passes.draws import draw_stream
from tilewright.passes.fusion import Region
from tilewright.passes.schedule import Unit
from tilewright.passes.units import is_view
from tilewright.runtime import attention_backward
from tilewright.runtime.draw import DrawStep
from tilewright.runtime.executable import CallStep, ConstantStep, Executable, KernelStep, Slot, Step, TensorSpec
from tilewright.runtime.gpu import TritonKernel, TritonStep

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


def assemble(scheduled: Scheduled, sources: Mapping[str, str], library: ctypes.CDLL | None) -> Executable:
    """The executable of one graph. `sources` has the kernel of each region by name; those in C++ are
    compiled in `library`."""
    return _Assembler(scheduled, sources, library).build()


def taken_over(scheduled: Scheduled) -> dict[fx.Node, fx.Node]:
    """The kernel results that are written in place, each with the operand whose storage it takes over."""
    assembler = _Assembler(scheduled, {}, None)
    return {
        node: over
        for position, unit in enumerate(scheduled.units)
        if isinstance(unit, Region)
        for node, over in zip(unit.lowered.outputs, assembler.takeovers(position, unit), strict=True)
        if over is not None
    }


class _Assembler:
    def __init__(self, scheduled: Scheduled, sources: Mapping[str, str], library: ctypes.CDLL | None) -> None:
        self.graph = scheduled.graph
        self.units = scheduled.units
        self.sources = sources
        self.library = library
        self.slots: dict[fx.Node, int] = {}
        self.output = self.graph.output_node()
        self.kernel_results = {n for u in self.units if isinstance(u, Region) for n in u.lowered.outputs}
        kernels = [u.lowered.nest for u in self.units if isinstance(u, Region)]
        self.draws = any(step.name == "draw" for nest in kernels for step in nest.steps)
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

    def _step(self, position: int, unit: Unit) -> Step:
        if isinstance(unit, Region):
            return self._kernel(position, unit)
        if unit.op == "get_attr":
            return ConstantStep(unit.name, attrgetter(str(unit.target))(self.graph.owning_module), self._slot(unit))
        args = tuple(self._argument(a) for a in unit.args)
        if unit.target is draw_stream and self.draws:
            assert self.library is not None
            return DrawStep(unit.name, DrawStep.taker(self.library), args[0], self._slot(unit))
        kwargs = {k: self._argument(v) for k, v in unit.kwargs.items()}
        target: Any = unit.target
        if target is attention_backward.OPERATOR:
            target = attention_backward.attention_backward()
        meta = unit.meta.get("val")
        if not isinstance(meta, torch.Tensor) or not _lies_as_told(meta):
            return CallStep(unit.name, target, args, kwargs, self._slot(unit))
        if target in OUT_VARIANTS and not kwargs and meta.is_contiguous() and meta.device.type == "cpu":
            return CallStep(unit.name, OUT_VARIANTS[target], args, {}, self._slot(unit), out=TensorSpec.of(meta))
        # A view of a tensor that lies as the graph says lies as the graph says.
        spec = None if is_view(unit) else TensorSpec.of(meta)
        return CallStep(unit.name, target, args, kwargs, self._slot(unit), spec=spec)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return Slot(self._slot(value))
        if isinstance(value, (list, tuple)):
            return tuple(self._argument(v) for v in value)
        if isinstance(value, dict):
            return {k: self._argument(v) for k, v in value.items()}
        return value

    def _kernel(self, position: int, region: Region) -> Step:
        inputs = tuple(self._slot(n) for n in region.lowered.inputs)
        outputs = [
            (self._slot(node), TensorSpec.of(node.meta["val"]), None if over is None else self._slot(over))
            for node, over in zip(region.lowered.outputs, self.takeovers(position, region), strict=True)
        ]
        if language_of(region.device) == "triton":
            kernel = TritonKernel(region.lowered.nest, self.sources[region.name])
            kernel.compile(region.device)
            return TritonStep(region.name, kernel, inputs, tuple(outputs), region.device)
        function = getattr(self.library, region.name)
        function.restype = None
        function.argtypes = (ctypes.c_void_p, ctypes.c_int)
        return KernelStep(region.name, function, inputs, tuple(outputs))

    def takeovers(self, position: int, region: Region) -> list[fx.Node | None]:
        """For each output of the region, the operand whose storage it overwrites."""
        found: list[fx.Node | None] = []
        taken: set[fx.Node] = set()
        for number in range(len(region.lowered.outputs)):
            over = self._takes_over(position, region, number, taken)
            if over is not None:
                taken.add(self._storage(over))
            found.append(over)
        return found

    def _takes_over(self, position: int, region: Region, number: int, taken: set[fx.Node]) -> fx.Node | None:
        """An operand whose storage dies here, that this graph computed, and that output `number` can overwrite."""
        nest = region.lowered.nest
        result = region.lowered.outputs[number].meta["val"]
        for index, node in enumerate(region.lowered.inputs):
            meta = node.meta["val"]
            same = meta.dtype == result.dtype and meta.numel() == result.numel() and meta.is_contiguous()
            storage = self._storage(node)
            shown_twice = sum(self._storage(n) is storage for n in region.lowered.inputs) > 1
            if not same or not result.is_contiguous() or storage in taken or shown_twice:
                continue
            if self._dies(storage, position) and writes_after_reads(nest, index, number):
                return node
        return None

    def _dies(self, storage: fx.Node, position: int) -> bool:
        """Whether this graph made `storage`, and nothing reads it or a view of it after `position`."""
        if storage not in self.kernel_results and storage.target not in OUT_VARIANTS:
            # Other library calls may hand back an operand.
            return False
        shown, todo = {storage}, [storage]
        while todo:
            for user in todo.pop().users:
                if _shows_operand(user) and user not in shown:
                    shown.add(user)
                    todo.append(user)
        return all(self.last_use.get(node, -1) <= position for node in shown)

    def _storage(self, node: fx.Node) -> fx.Node:
        """The kernel result or library result that `node` shows."""
        while node not in self.kernel_results and is_view(node) and isinstance(node.args[0], fx.Node):
            node = node.args[0]
        return node


def _shows_operand(node: fx.Node) -> bool:
    """Whether a call may give its operand's own storage, known to the table as a view or not."""
    schema = getattr(node.target, "_schema", None)
    return is_view(node) or (schema is not None and any(r.alias_info is not None for r in schema.returns))


def _lies_as_told(meta: torch.Tensor) -> bool:
    """Whether a tensor lies in memory as its strides say."""
    return meta.device.type in ("cpu", "cuda") and meta.layout is torch.strided and meta.numel() > 0


def _input_spec(node: fx.Node) -> TensorSpec | None:
    meta = node.meta.get("val")
    return TensorSpec.of(meta) if isinstance(meta, torch.Tensor) and _lies_as_told(meta) else None


def writes_after_reads(nest: Nest, source: int, target: int) -> bool:
    """Whether output `target` may share storage with input `source`: each element is read for the
    last time in the pass over the columns that writes it."""
    stores = [s for s in nest.stores if s.access.buffer == len(nest.inputs) + target]
    loads = [s for s in nest.steps if s.access and s.access.buffer == source]
    if any(load.access and load.access.strides != stores[0].access.strides for load in loads):
        return False
    if any(s.where == "after" or s.name == "reduce_rows" for s in (nest.steps[x.value] for x in stores)):
        return False
    walked = zip(nest.rows + nest.cols, stores[0].access.strides, strict=True)
    if not any(s.name.startswith("reduce") for s in nest.steps) and not all(stride or n == 1 for n, stride in walked):
        # A narrow result in a wide elementwise nest: other blocks of the row still read the operand.
        return False
    return nest.steps[stores[0].value].stage == nest.stages - 1 or nest.stages == 1
