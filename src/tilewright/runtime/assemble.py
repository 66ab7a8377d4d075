"""Makes an executable of scheduled units: assigns slots, lifetimes, in-place storage and `out=` calls."""

from __future__ import annotations

import ctypes
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.fx.node import map_arg

from tilewright.capture.aot import Boxed
from tilewright.capture.partition import HIDDEN
from tilewright.graph.calls import arguments, class_of, closure, through
from tilewright.graph.source import source_line
from tilewright.graph.views import PIECES, base_of, has_static_layout, is_written, part_of
from tilewright.kernels.by_recipe import RECIPES
from tilewright.kernels.dropout_add.stream import draw_stream
from tilewright.kernels.registration import IMPLEMENTATIONS
from tilewright.launch.builder import Operand
from tilewright.launch.generated import kernel_of
from tilewright.operators.collectives import WAIT
from tilewright.passes.fusion import Region
from tilewright.passes.index.embeddings import is_table
from tilewright.passes.schedule import Unit
from tilewright.passes.units import is_view
from tilewright.pytorch.state import carries_tangents
from tilewright.records.recipe import LINE, Layout, Recipe
from tilewright.runtime import attention_backward
from tilewright.runtime.draw import DrawStep
from tilewright.runtime.executable import (
    CPU,
    CallStep,
    ConstantStep,
    Executable,
    GeneratedStep,
    GiveUp,
    KernelStep,
    Slot,
    Step,
    ViewStep,
    is_unresolved,
    layout_of,
    warn_of,
)
from tilewright.runtime.gpu import SizedRecipe, SizedTritonStep, TritonStep
from tilewright.runtime.native import NUMBERS, Native, holds_values
from tilewright.runtime.resume import resumption
from tilewright.runtime.storage_reuse import same_storage_layout, writes_after_reads

aten = torch.ops.aten
PRODUCTS = frozenset({aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default})
"""Library calls that write into pooled storage (`out=`) on a CPU."""


@dataclass
class Scheduled:
    """A graph ready to run: its units in order."""

    graph: fx.Graph
    units: list[Unit]


def assemble(
    scheduled: Scheduled,
    sources: Mapping[str, str],
    library: ctypes.CDLL | None,
    give_up: GiveUp = warn_of,
    sizes: Mapping[str, tuple[int | float, ...]] | None = None,
) -> Executable:
    """The executable of one graph. `sources` has each region's kernel source by name; `library` has the compiled C++
    kernels. `give_up` is called when PyTorch must run the graph after all. `sizes` has the kernels' arguments by region
    in a program for all sizes; what is compiled for a GPU is left to `at_sizes`."""
    return _Assembler(scheduled, sources, library, sizes).build(give_up)


def taken_over(scheduled: Scheduled) -> dict[fx.Node, fx.Node]:
    """The kernel results that overwrite an operand's storage, each with that operand."""
    assembler = _Assembler(scheduled, {}, None, None)
    return {
        node: over
        for position, unit in enumerate(assembler.units)
        if isinstance(unit, Region)
        for node, over in zip(unit.lowered.outputs, assembler.takeovers(position, unit), strict=True)
        if over is not None
    }


def kernel_step(
    region: Region,
    source: str,
    library: ctypes.CDLL | None,
    inputs: tuple[int, ...],
    outputs: tuple[tuple[int, Layout, int | None], ...],
    sizes: tuple[int | float, ...] | None = None,
) -> GeneratedStep:
    """The step that runs a region's compiled kernel over these slots; `sizes` are its arguments in a program for all
    sizes. Raises KernelError if it does not compile."""
    lowered, device = region.lowered, region.device
    if region.language == "triton":
        places = [n.meta["val"].device for n in lowered.inputs]
        elsewhere = tuple(i for i, place in enumerate(places) if place != device)
        if sizes is not None:
            beside = device, elsewhere, lowered.numbers
            return SizedTritonStep(region.name, inputs, outputs, region.kernel, sizes, *beside)
        kernel = kernel_of(lowered.nest, source)
        kernel.compile(device)
        return TritonStep(region.name, inputs, outputs, kernel, device, elsewhere, lowered.numbers)
    function: Any = getattr(library, region.kernel)
    function.restype = ctypes.c_int
    function.argtypes = (ctypes.c_void_p, ctypes.c_int)
    return KernelStep(region.name, inputs, outputs, function, lowered.nest.checks, sizes or ())


class _Assembler:
    def __init__(
        self,
        scheduled: Scheduled,
        sources: Mapping[str, str],
        library: ctypes.CDLL | None,
        sizes: Mapping[str, tuple[int | float, ...]] | None,
    ) -> None:
        self.graph = scheduled.graph
        self.sources = sources
        self.library = library
        self.sizes = sizes
        self.slots: dict[fx.Node, int] = {}
        self.output = self.graph.output_node()
        self.results = set(self.output.all_input_nodes)
        self.restrided: dict[fx.Node, bool] = {}
        self.units = self._needed(scheduled.units)
        self.kernel_results = {n for u in self.units if isinstance(u, Region) for n in u.lowered.outputs}
        kernels = [u.lowered.nest for u in self.units if isinstance(u, Region)]
        self.device = self._device()
        self.draws = any(step.name == "draw" for nest in kernels for step in nest.steps)
        self.last_use = self._last_uses()

    def build(self, give_up: GiveUp) -> Executable:
        inputs = [(self._slot(n), _input_spec(n)) for n in self.graph.nodes if n.op == "placeholder"]
        steps = [self._step(position, unit) for position, unit in enumerate(self.units)]
        frees: dict[int, list[int]] = {}
        for node, last in self.last_use.items():
            if node in self.slots:
                frees.setdefault(last, []).append(self.slots[node])
        for position, step in enumerate(steps):
            step.frees = tuple(frees.get(position, ()))
        results = [self._argument(a) for a in self.output.args[0]]  # type: ignore[union-attr]
        # One executor runs graphs on one device.
        native = Native(self.device or CPU) if len(self._gpus()) <= 1 and holds_values(self.graph) else None
        resume = resumption(self.graph, self.units, self.slots)
        return Executable(steps, len(self.slots), inputs, results, interpreted(self.graph), resume, native, give_up)

    def _device(self) -> torch.device | None:
        """The GPU of the graph's tensors; None if none is on a GPU, or on several GPUs."""
        gpus = self._gpus()
        return gpus.pop() if len(gpus) == 1 else None

    def _gpus(self) -> set[torch.device]:
        tensors = (node.meta.get("val") for node in self.graph.nodes)
        return {x.device for x in tensors if isinstance(x, torch.Tensor) and x.device.type == "cuda"}

    def _needed(self, units: Sequence[Unit]) -> list[Unit]:
        """`units` without views that only kernels and other such views read: these address the base by strides."""
        calls = [u for u in units if isinstance(u, fx.Node) and not self._is_restrided(u)]
        asked = {n for call in (*calls, self.output) for n in call.all_input_nodes}
        asked |= {base_of(n) for u in units if isinstance(u, Region) for n in u.lowered.inputs}
        return [u for u in units if isinstance(u, Region) or not self._is_restrided(u) or u in asked]

    def _is_restrided(self, unit: fx.Node) -> bool:
        """Whether `as_strided` of its base can replace a view. A view that is returned or written to stays an operator,
        since PyTorch counts its versions; not a table's gradient, which is to be no view, as eager's is none."""
        if unit not in self.restrided:
            if unit.target in PIECES:
                found = all(map(self._is_restrided, unit.users))
            else:
                is_shown = unit in self.results and not is_table(unit)
                found = not is_written(unit) and part_of(unit).base is not unit and not is_shown
            self.restrided[unit] = found
        return self.restrided[unit]

    def _slot(self, node: fx.Node) -> int:
        return self.slots.setdefault(node, len(self.slots))

    def _reads(self, unit: Unit) -> Sequence[fx.Node]:
        if isinstance(unit, Region):
            return [base_of(n) for n in unit.lowered.inputs]
        return [part_of(unit).base] if self._is_restrided(unit) else unit.all_input_nodes

    def _collective_operands(self, unit: Unit) -> Sequence[fx.Node]:
        """The operands of the collective that this call waits for: the collective's stream reads them until then."""
        if not isinstance(unit, fx.Node) or str(unit.target) != WAIT:
            return ()
        return self._reads(through(unit.all_input_nodes[0], lambda result: result.target is operator.getitem))

    def _last_uses(self) -> dict[fx.Node, int]:
        last: dict[fx.Node, int] = {}
        for position, unit in enumerate(self.units):
            for node in (*self._reads(unit), *self._collective_operands(unit)):
                last[node] = position
        for node in self.output.all_input_nodes:
            last[node] = len(self.units)
        return last

    def _step(self, position: int, unit: Unit) -> Step:
        if isinstance(unit, Region):
            return self._kernel(position, unit)
        if unit.op == "get_attr":
            return ConstantStep(unit.name, self._slot(unit), attrgetter(str(unit.target))(self.graph.owning_module))
        args = tuple(self._argument(a) for a in unit.args)
        if unit.target is draw_stream and self.draws:
            assert self.library is not None
            return DrawStep(unit.name, self._slot(unit), DrawStep.taker(self.library), args[0])
        kwargs = {k: self._argument(v) for k, v in unit.kwargs.items()}
        target: Any = unit.target
        if target is attention_backward.OPERATOR:
            target = attention_backward.attention_backward()
        elif isinstance(target, OpOverload):
            # Autograd and Dynamo are done here: call the implementation without the dispatcher, which costs more. Only
            # the dispatcher resolves what is shown conjugated or negated.
            target = target if _reads_unresolved(unit) else IMPLEMENTATIONS.get(target.name(), target)
        meta = unit.meta.get("val")
        recipe = self._recipe(unit)
        stands_for: Any = None if recipe is None else unit.target
        if not has_static_layout(meta):
            return CallStep(unit.name, self._slot(unit), target, args, kwargs, recipe=recipe, operator=stands_for)
        spec = layout_of(meta)
        if self._is_restrided(unit):
            base, offset = part_of(unit)
            return ViewStep(unit.name, self._slot(unit), self._slot(base), spec, offset)
        if unit.target in PRODUCTS and meta.device.type == "cpu" and not kwargs and meta.is_contiguous():
            return CallStep(unit.name, self._slot(unit), target.overloadpacket.out, args, {}, out=spec)
        # A view of a tensor in its planned layout is as planned; a result of several may not be.
        given = None if is_view(unit) and unit.target is not operator.getitem else spec
        return CallStep(unit.name, self._slot(unit), target, args, kwargs, given, recipe=recipe, operator=stands_for)

    def _recipe(self, unit: fx.Node) -> Recipe | SizedRecipe | None:
        """The recipe of a call of a tilewright operator with all tensors on the graph's GPU, if it has one."""
        target, metas = unit.target, [n.meta.get("val") for n in unit.all_input_nodes]
        if self.device is None or not isinstance(target, OpOverload) or target.name() not in RECIPES:
            return None
        if _reads_unresolved(unit):
            return None
        if not all(isinstance(meta, torch.Tensor) and meta.device == self.device for meta in metas):
            return None
        operands: dict[fx.Node, Any] = {n: self._operand(number, n) for number, n in enumerate(unit.all_input_nodes)}
        given = map_arg(list(arguments(unit).values()), operands.__getitem__)
        results = unit.meta["val"] if isinstance(unit.meta["val"], (tuple, list)) else [unit.meta["val"]]
        # A call's results are copied if their layout is not as planned; a recipe's results must be as planned.
        planned = tuple(map(layout_of, results))
        recipe = SizedRecipe(target, tuple(operands.values()), tuple(given), planned)
        return recipe.built() if self.sizes is None else recipe

    def _operand(self, number: int, node: fx.Node) -> Operand:
        """A tensor of the graph as an operand; its memory is assumed to begin at a multiple of `LINE`."""
        meta = node.meta["val"]
        begin = 0 if node in self.kernel_results else meta.storage_offset() * meta.element_size() % LINE
        return Operand(number, tuple(meta.shape), tuple(meta.stride()), meta.dtype, meta.device, begin)

    def _argument(self, value: Any) -> Any:
        if isinstance(value, fx.Node):
            return Slot(self._slot(value), isinstance(value.meta.get("val"), NUMBERS))
        if isinstance(value, tuple):
            return tuple(self._argument(v) for v in value)
        if isinstance(value, list):
            return [self._argument(v) for v in value]
        if isinstance(value, dict):
            return {k: self._argument(v) for k, v in value.items()}
        return value

    def _kernel(self, position: int, region: Region) -> Step:
        inputs = tuple(self._slot(base_of(n)) for n in region.lowered.inputs)
        outputs = [
            (self._slot(node), layout_of(node.meta["val"]), None if over is None else self._slot(base_of(over)))
            for node, over in zip(region.lowered.outputs, self.takeovers(position, region), strict=True)
        ]
        sizes = None if self.sizes is None else self.sizes.get(region.name, ())
        step = kernel_step(region, self.sources[region.name], self.library, inputs, tuple(outputs), sizes)
        step.given = frozenset(map(self._slot, self.graph.find_nodes(op="placeholder")))
        return step

    def takeovers(self, position: int, region: Region) -> list[fx.Node | None]:
        """For each output of the region, the operand whose storage it overwrites, or None."""
        found: list[fx.Node | None] = []
        taken: set[fx.Node] = set()
        for number in range(len(region.lowered.outputs)):
            over = self._takes_over(position, region, number, taken)
            if over is not None:
                taken.add(self._storage(over))
            found.append(over)
        return found

    def _takes_over(self, position: int, region: Region, number: int, taken: set[fx.Node]) -> fx.Node | None:
        """An operand that output `number` can overwrite: nothing reads its storage after the unit at `position`."""
        nest, in_order = region.lowered.nest, region.language == "c++"
        result = region.lowered.outputs[number].meta["val"]
        for index, node in enumerate(region.lowered.inputs):
            meta = node.meta["val"]
            storage = self._storage(node)
            shown_twice = sum(self._storage(n) is storage for n in region.lowered.inputs) > 1
            if not same_storage_layout(meta, result) or storage in taken or shown_twice:
                continue
            if self._dies(storage, position) and writes_after_reads(nest, index, number, in_order=in_order):
                return node
        return None

    def _dies(self, storage: fx.Node, position: int) -> bool:
        """Whether this graph or its forward made `storage`, and nothing reads it or a view of it after `position`."""
        is_saved = storage.op == "placeholder" and storage.meta.get(HIDDEN, False)
        if storage not in self.kernel_results and not _is_computed(storage) and not is_saved:
            # Another library call may return its operand.
            return False
        shown = closure([storage], lambda node: filter(_shows_operand, node.users))
        return all(self.last_use.get(node, -1) <= position for node in shown)

    def _storage(self, node: fx.Node) -> fx.Node:
        """The kernel result or library result whose storage `node` shares."""
        return through(node, lambda view: view not in self.kernel_results and is_view(view))


def interpreted(graph: fx.Graph) -> Boxed:
    """A function that runs the graph as PyTorch does, operator by operator."""
    own = next((node for node in graph.nodes if str(node.target).startswith("tilewright.")), None)

    @cache
    def module() -> fx.GraphModule:
        return fx.GraphModule(graph.owning_module or torch.nn.Module(), graph)

    def run(args: list[Any]) -> Sequence[Any]:
        if own is not None and carries_tangents(args):
            where = source_line(own) or own.name
            raise NotImplementedError(
                f"forward-mode differentiation reaches {own.target} at {where}, which has no tangent: "
                "call the function as it was before torch.compile"
            )
        inputs = list(args)
        args.clear()
        results: Sequence[Any] = module().forward(*inputs)
        return results

    return run


def _reads_unresolved(unit: fx.Node) -> bool:
    """Whether an operand is shown conjugated or negated."""
    metas = [n.meta.get("val") for n in unit.all_input_nodes]
    return any(is_unresolved(meta) for meta in metas if isinstance(meta, torch.Tensor))


def _shows_operand(node: fx.Node) -> bool:
    """Whether a call may return its operand's storage, whether or not the table calls it a view."""
    schema = getattr(node.target, "_schema", None)
    return is_view(node) or (schema is not None and any(r.alias_info is not None for r in schema.returns))


def _is_computed(node: fx.Node) -> bool:
    """Whether a call allocates its result: products, convolutions, attention; not calls that write to an operand."""
    return class_of(node) == "compute" and not _shows_operand(node)


def _input_spec(node: fx.Node) -> Layout | None:
    meta = node.meta.get("val")
    return layout_of(meta) if has_static_layout(meta) else None
