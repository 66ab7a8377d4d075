"""Generated Triton kernels among the steps of an executable."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from tilewright.emit.triton import emit_triton
from tilewright.kernels.by_recipe import compiled_recipe
from tilewright.launch.builder import Operand
from tilewright.launch.generated import TritonKernel, compile_together
from tilewright.loops.nest import Nest
from tilewright.loops.sizes import filled, given
from tilewright.records.recipe import Layout, Recipe
from tilewright.runtime.executable import CallStep, GeneratedStep, Slots, Step


@dataclass
class TritonStep(GeneratedStep):
    """One Triton kernel among the steps of an executable."""

    kernel: TritonKernel
    device: torch.device
    elsewhere: tuple[int, ...] = ()
    """Positions of inputs that are on the CPU although the others are on a GPU, as 0-d tensors may be."""
    numbers: tuple[int, ...] = ()
    """The launch's arguments beside the buffers (`Lowered.numbers`)."""

    def recipe(self) -> Recipe | None:
        """The recipe with which the executor runs this step; None if Triton must launch it."""
        return self.kernel.recipe(self.device, [layout for _, layout, _ in self.outputs], self.numbers)

    def run(self, slots: Slots) -> None:
        tensors = [slots[i] for i in self.inputs]
        for place in self.elsewhere:
            tensors[place] = tensors[place].to(self.device)
        self.kernel.launch(tensors + self.results(slots), numbers=self.numbers)


@dataclass
class SizedTritonStep(GeneratedStep):
    """The same in a program for all sizes: the kernel is printed when the sizes are known."""

    kernel: str
    """The name of its nest."""
    sizes: tuple[int | float, ...]
    """The kernel's arguments."""
    device: torch.device
    elsewhere: tuple[int, ...] = ()
    numbers: tuple[int, ...] = ()

    def at(self, kernel: TritonKernel) -> TritonStep:
        step = TritonStep(self.name, self.inputs, self.outputs, kernel, self.device, self.elsewhere, self.numbers)
        step.frees, step.given = self.frees, self.given
        return step


@dataclass(frozen=True)
class SizedRecipe:
    """The recipe of a call in a program for all sizes: it is built when the sizes are known."""

    operator: Any
    operands: tuple[Operand, ...]
    arguments: tuple[Any, ...]
    """Those of the call, with operands in place of tensors."""
    results: tuple[Layout, ...]

    def built(self) -> Recipe | None:
        """None if the operator has none, or one with results in other layouts."""
        recipe = compiled_recipe(self.operator.name(), self.operands, self.arguments)
        found = () if recipe is None else tuple(recipe.buffers[number] for number in recipe.results)
        return recipe if found == self.results else None


def at_sizes(steps: Sequence[Step], nests: Mapping[str, Nest]) -> list[Step]:
    """The steps of a program for all sizes, filled with those of a call, ready to run; `nests` has its Triton kernels
    by name. Raises KernelError."""
    kernels: dict[tuple[Any, ...], TritonKernel] = {}
    wanted = []
    for step in steps:
        key = (step.kernel, step.sizes) if isinstance(step, SizedTritonStep) else ()
        if isinstance(step, SizedTritonStep) and key not in kernels:
            named, passed = given(step.sizes)
            nest = filled(nests[step.kernel], named)
            kernels[key] = TritonKernel(nest, emit_triton(nest), passed)
            wanted.append((kernels[key], step.device))
    compile_together(wanted)
    for kernel, device in wanted:
        kernel.compile(device)
    return [_at_sizes(step, kernels) for step in steps]


def _at_sizes(step: Step, kernels: Mapping[tuple[Any, ...], TritonKernel]) -> Step:
    if isinstance(step, SizedTritonStep):
        return step.at(kernels[step.kernel, step.sizes])
    if isinstance(step, CallStep) and isinstance(step.recipe, SizedRecipe):
        recipe = step.recipe.built()
        return replace(step, recipe=recipe, operator=None if recipe is None else step.operator)
    return step
