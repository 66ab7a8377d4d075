"""Values that several kernels read: computed in each where that moves fewer bytes, else written once."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.contract import keeps_contract
from tests.passes.graphs import aten
from tilewright.hardware.target import target_named
from tilewright.passes.fusion import fuse
from tilewright.passes.rematerialise import compute_in_each_reader

ROWS, COLUMNS = 1024, 320
CPU = target_named("cpu")


def centred_gate(g: Tensor, z: Tensor) -> Tensor:
    """The second kernel reads g in place of the product."""
    dz = g * z.sigmoid()
    return dz - z * dz.sum(0)


def centred_gate_of_three(g: Tensor, z: Tensor, r: Tensor) -> Tensor:
    """With three operands the second kernel would read what the first no longer writes."""
    dz = (g + r) * z.sigmoid()
    return dz - z * dz.sum(0)


def given_too(g: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """A result is written whoever reads it."""
    dz = g * z.sigmoid()
    return dz, dz - z * dz.sum(0)


def of_a_product(g: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """What a library computes is read from memory."""
    product = (g @ z.t())[:, :COLUMNS]
    return product.exp(), product - product.sum(0)


def inputs(count: int) -> list[Tensor]:
    return [torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(n)) for n in range(count)]


@pytest.mark.parametrize(
    ("program", "operands", "again"),
    [(centred_gate, 2, True), (centred_gate_of_three, 3, False), (given_too, 2, False), (of_a_product, 2, False)],
)
def test_values_are_computed_again_where_fewer_bytes_move(
    program: Callable[..., Any], operands: int, again: bool
) -> None:
    graph = aten(program, *inputs(operands))
    before = [region.lowered for region in fuse(graph, "forward", CPU).regions]
    assert compute_in_each_reader(graph, fuse(graph, "forward", CPU).regions, CPU.profile) is again
    graph.lint()
    after = [region.lowered for region in fuse(graph, "forward", CPU).regions]
    assert len(before) == len(after) >= 1
    assert (moved(after) < moved(before)) is again


def moved(kernels: list[Any]) -> int:
    return sum(buffer.elements for kernel in kernels for buffer in kernel.nest.buffers)


def test_the_numbers_stay() -> None:
    (graph,) = keeps_contract(centred_gate, inputs(2)).graphs
    large = ROWS * COLUMNS
    kernels = [region.lowered.nest for region in graph.plan.fusion.regions]
    assert [sum(buffer.elements == large for buffer in nest.outputs) for nest in kernels] == [0, 1]
