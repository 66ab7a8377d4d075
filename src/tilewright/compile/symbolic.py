"""One program for all sizes of a graph: planned for four, with each integer that differs as a function of the symbols.

    rows 11, 17, 22, 29 and 88, 136, 176, 232 elements for s0 = 11, 17, 22, 29   →   rows s0, s0 * 8 elements

What is fused is decided for one of the sizes, and the others follow. Kernels take such integers as arguments. The four
sizes are prime, or twice a prime, where the graph's conditions allow it, so what the plans have in common is no
coincidence of one size.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from tilewright.capture import program_cache
from tilewright.capture.aot import Boxed
from tilewright.compile.plan import GraphPlan
from tilewright.compile.planner import Planner
from tilewright.emit.cpp import translation_unit
from tilewright.emit.narrow_integers import far_loads, narrow_steps
from tilewright.emit.source import source_of
from tilewright.graph.size_expressions import Expressions
from tilewright.graph.size_symbols import FAR, POINTS, Sizes, SizeSymbols, remainders
from tilewright.graph.specialise import specialise
from tilewright.graph.undefined import left_out
from tilewright.loops.nest import Nest, named_as
from tilewright.loops.sizes import Arguments, NotAlike, Number, alike, filled, filler, for_all_sizes, of_all_sizes
from tilewright.records import outcomes
from tilewright.records.errors import CaptureError, KernelError, TilewrightError
from tilewright.records.program import GraphName
from tilewright.records.recipe import Layout
from tilewright.runtime.assemble import Scheduled, assemble, interpreted
from tilewright.runtime.compiler import load
from tilewright.runtime.executable import Executable, GiveUp, KernelStep, PlanMismatch, Resume
from tilewright.runtime.gpu import SizedTritonStep, at_sizes
from tilewright.runtime.native import Native


@dataclass(frozen=True)
class SymbolicGraph:
    """A graph with symbolic sizes, and how it is planned for some."""

    name: GraphName
    module: fx.GraphModule
    symbols: SizeSymbols
    planner: Planner
    kept_for: str | None = None
    """The key of the program whose plans are kept on disk."""

    def key(self, sizes: Sizes, moduli: Sizes) -> str | None:
        """The key of the plans that serve these sizes: those of others with about as many bits."""
        if self.kept_for is None:
            return None
        magnitudes = [size.bit_length() // FAR.bit_length() for size in sizes]
        kind = left_out(self.module.graph), moduli, remainders(sizes, moduli), *magnitudes
        return program_cache.key_for_sizes(self.kept_for, self.name, kind)

    def plans(self, sizes: Sizes, args: Sequence[Any], moduli: Sizes) -> dict[Sizes, GraphPlan]:
        """The plans for four sizes near those of a call with these arguments. Raises NotAlike."""
        points = self.symbols.points(sizes, moduli)
        if len(points) < POINTS:
            raise NotAlike("too few sizes meet its conditions")
        middle = points[POINTS // 2]
        with for_all_sizes():
            (first,) = self.planner.plan({self.name: self._at(middle, args)}).graphs
        return {point: first if point == middle else self.plan_like(first, point, args) for point in points}

    def plan_like(self, first: GraphPlan, sizes: Sizes, args: Sequence[Any]) -> GraphPlan:
        """The plan for other sizes with the kernels of `first`. Raises NotAlike."""
        with for_all_sizes():
            return self.planner.plan_like(first, self._at(sizes, args))

    def _at(self, sizes: Sizes, args: Sequence[Any]) -> fx.Graph:
        try:
            return specialise(self.module, self.symbols.inputs_at(sizes, args)).graph
        except CaptureError as error:
            raise NotAlike(str(error)) from error


def symbolic_program(
    graph: SymbolicGraph, sizes: Sizes, args: Sequence[Any], give_up: GiveUp, lost: Callable[[Exception], None]
) -> SymbolicProgram:
    """The program for sizes near those of a call with these arguments, from plans on disk if they are there. Raises
    NotAlike. `lost` hears of plans that cannot be used."""
    *others, last = graph.symbols.moduli()
    for moduli in others:
        with suppress(NotAlike):
            return _program(graph, sizes, args, give_up, lost, moduli)
    return _program(graph, sizes, args, give_up, lost, last)


def _program(
    graph: SymbolicGraph,
    sizes: Sizes,
    args: Sequence[Any],
    give_up: GiveUp,
    lost: Callable[[Exception], None],
    moduli: Sizes,
) -> SymbolicProgram:
    key = graph.key(sizes, moduli)
    try:
        kept = None if key is None else program_cache.load_plan(key)
        if isinstance(kept, dict):
            return SymbolicProgram(graph, kept, moduli, args, give_up)
    # After any error the sizes can be planned as if nothing had been kept.
    except Exception as error:
        program_cache.discard(key or "")
        lost(error)
        kept = None
    if isinstance(kept, str):
        raise NotAlike(kept)
    with outcomes.recording() as looked_up:
        try:
            plans = graph.plans(sizes, args, moduli)
            program = SymbolicProgram(graph, plans, moduli, args, give_up)
        except NotAlike as error:
            if key is not None:
                program_cache.keep_plan(key, str(error), [], looked_up)
            raise
    if key is not None:
        bare = {point: plan.bare() for point, plan in plans.items()}
        program_cache.keep_plan(key, bare, [plan.graph for plan in bare.values()], looked_up)
    return program


class SymbolicProgram:
    """Makes the executable of one graph for any sizes: only integers are computed. Raises NotAlike if the plans differ
    in more than integers."""

    def __init__(
        self,
        graph: SymbolicGraph,
        plans: Mapping[Sizes, GraphPlan],
        moduli: Sizes,
        args: Sequence[Any],
        give_up: GiveUp,
    ) -> None:
        self.graph = graph
        self.moduli = moduli
        self.points = list(plans)
        self.give_up = give_up
        self.inputs = [_layout(x) if isinstance(x, torch.Tensor) else x for x in args]
        self.otherwise = interpreted(graph.module.graph)
        self.plan = list(plans.values())[len(plans) // 2]
        """The plan for one of the sizes."""
        self.order = [unit.name for unit in self.plan.units]
        kernels = _Kernels(list(plans.values()))
        self.library = load(translation_unit(kernels.sources)) if kernels.sources else None
        self.nests, self.kernel_of = kernels.nests, kernels.kernel_of
        made = [self._assembled(plan, kernels.arguments_at(number)) for number, plan in enumerate(plans.values())]
        self.example = made[len(made) // 2]
        """The executable of `plan`."""
        found = Arguments()
        steps = alike([list(each.steps) for each in made], found.argument, "a step")
        layouts = alike([list(each.inputs) for each in made], found.argument, "an input")
        outputs = alike([list(each.outputs) for each in made], found.argument, "a result")
        # Without arguments there is nothing to fill.
        self.fill = filler([steps, layouts, outputs]) or (lambda values: [steps, layouts, outputs])
        known = graph.symbols.expressions(self.points, moduli)
        self.integers = graph.symbols.evaluator([_expression(known, values) for values in found.values])
        self.sizes, self.taken_as = map(graph.symbols.evaluator, known.same)
        every = (self.integers(*point) for point in self.points)
        self.are_wide = [set(map(_is_wide, values)) for values in zip(*every, strict=True)]
        narrow = {name: narrow_steps(nest) for name, nest in self.nests.items()}
        self.narrow = [
            (self.nests[name], narrow[name], far_loads(self.nests[name]), step.sizes)
            for step in steps
            if isinstance(step, KernelStep) and narrow[name := self.kernel_of[step.name]]
        ]
        """Kernels that compute some integers in 32 bits: the nest, these steps, the loads whose places take 64 bits,
        and the arguments."""

    def _assembled(self, plan: GraphPlan, arguments: Mapping[str, tuple[Number, ...]]) -> Executable:
        units = {unit.name: unit for unit in plan.units}
        if units.keys() != set(self.order):
            raise NotAlike("their kernels and calls are other ones")
        # The order of least memory depends on the sizes.
        ordered = Scheduled(plan.graph, [units[name] for name in self.order])
        return assemble(ordered, plan.sources, self.library, self.give_up, arguments)

    def serves(self, sizes: Sizes) -> bool:
        points = self.points[0]
        remain = remainders(sizes, self.moduli) == remainders(points, self.moduli)
        return remain and self.sizes(*sizes) == self.taken_as(*sizes) and self._fits(sizes)

    def _fits(self, sizes: Sizes) -> bool:
        """Whether the plan's integers fit 32 bits where they do at the sizes for which it was made, and so does what
        its kernels compute from them."""
        integers = self.integers(*sizes)
        if any(_is_wide(number) not in known for number, known in zip(integers, self.are_wide, strict=True)):
            return False
        for nest, narrow, far, arguments in self.narrow:
            there = filled(nest, filled(arguments, integers))
            if not (narrow <= narrow_steps(there) and far_loads(there) <= far):
                return False
        return True

    def is_near(self, sizes: Sizes) -> bool:
        middle = self.points[len(self.points) // 2]
        return all(size <= FAR * known and known <= FAR * size for size, known in zip(sizes, middle, strict=True))

    def executable(self, sizes: Sizes) -> Boxed:
        integers = self.integers(*sizes)
        example = self.example
        native = None if example.native is None else Native(example.native.device)
        steps, layouts, outputs = self.fill(integers)
        if os.environ.get("TILEWRIGHT_VERIFY") == "1":
            self._verify(sizes, steps, layouts, outputs)
        try:
            steps = at_sizes(steps, self.nests)
        except KernelError as error:
            self.give_up(PlanMismatch(str(error)))
            return self.otherwise
        return Executable(
            steps,
            example.slots,
            layouts,
            outputs,
            self.otherwise,
            self._resume(sizes),
            native,
            self.give_up,
        )

    def _verify(self, sizes: Sizes, *derived: list[Any]) -> None:
        """Plan for these sizes, and compare each number with the derived one. Where the plan differs in more than
        numbers, as where two extents are equal by chance, there is nothing to compare. Raises TilewrightError."""
        arguments = {step.name: step.sizes for step in derived[0] if isinstance(step, (KernelStep, SizedTritonStep))}
        with suppress(NotAlike):
            plan = self.graph.plan_like(self.plan, sizes, self.inputs)
            planned = self._assembled(plan, arguments)
            # A region that nothing reads has no kernel.
            for region in (region for region in plan.fusion.regions if region.name in arguments):
                nest = self.nests[self.kernel_of[region.name]]
                region.share(named_as(region.lowered.nest, nest))
                there = of_all_sizes([region.lowered.nest, region.lowered.nest], region.name)[0]
                here = replace(filled(nest, arguments[region.name]), argument_dtypes=())
                alike([here, named_as(there, nest)], _equal, region.name)
            for part, found in zip(derived, (planned.steps, planned.inputs, planned.outputs), strict=True):
                alike([part, list(found)], _equal, "a step")

    def _resume(self, sizes: Sizes) -> Resume:
        def resume(position: int, slots: list[Any]) -> Sequence[Any]:
            planned = self._assembled(self.graph.plan_like(self.plan, sizes, self.inputs), {})
            return planned.resume(position, slots)

        return resume


class _Kernels:
    """The kernels of plans for several sizes, each once with its integers as arguments. Regions whose kernels are the
    same with arguments share one. Raises NotAlike."""

    def __init__(self, plans: Sequence[GraphPlan]) -> None:
        self.arguments: dict[str, list[tuple[Number, ...]]] = {}
        """By region: the values of its kernel's arguments, for each argument one for each plan."""
        self.sources: list[str] = []
        """Those in C++, which serve all sizes."""
        self.nests: dict[str, Nest] = {}
        """All kernels by name. Those for GPUs are printed for the sizes of a call, and are one for all sizes for which
        they print the same."""
        self.kernel_of: dict[str, str] = {}
        """By region."""
        known: dict[str, Nest] = {}
        for regions in zip(*(plan.fusion.regions for plan in plans), strict=True):
            first = regions[0]
            lowered = [region.lowered.nest for region in regions]
            nest, self.arguments[first.name] = of_all_sizes(lowered, first.name, with_offsets=first.language == "c++")
            key = repr(nest) + first.language
            if key not in known:
                known[key] = named_as(nest, replace(first.lowered.nest, name=first.name))
                self.nests[known[key].name] = known[key]
                if first.language == "c++":
                    self.sources.append(source_of(replace(first.lowered, nest=known[key])))
            self.kernel_of[first.name] = known[key].name
            for region in regions:
                region.share(named_as(region.lowered.nest, known[key]))

    def arguments_at(self, number: int) -> dict[str, tuple[Number, ...]]:
        """By region: its kernel's arguments in one of the plans."""
        return {name: tuple(values[number] for values in found) for name, found in self.arguments.items()}


def _equal(values: tuple[Number, ...]) -> Number:
    if repr(values[0]) != repr(values[1]):
        raise TilewrightError(f"a program for all sizes has {values[0]} where the plan for these has {values[1]}")
    return values[0]


def _is_wide(number: Number) -> bool:
    return abs(number) >= 2**31


def _layout(tensor: torch.Tensor) -> Layout:
    return Layout(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def _expression(known: Expressions, values: Sequence[Number]) -> str:
    if (text := known.of(values)) is None:
        raise NotAlike(f"{', '.join(map(str, values))} are made of no size, or of several")
    return text
