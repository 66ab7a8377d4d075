"""A generated Triton kernel among the steps of an executable."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tilewright.launch.generated import TritonKernel
from tilewright.records.recipe import Recipe
from tilewright.runtime.executable import GeneratedStep, Slots


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
