"""Pooling, compiled: eager's values, positions and gradients, and which windows become kernels on a CPU."""

import pytest
import torch

from tests.operators.pools import APART, LAYOUTS, LEFT, OVERLAPPING, image, library_pools
from tilewright.backend import backend, recording


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*APART, *OVERLAPPING, *LEFT])
def test_values_positions_and_gradients_are_eagers(name: str, layout: str) -> None:
    assert bool(library_pools(name, image(layout))) == (name not in APART and name != "max of an exponential")


def test_a_costly_operand_is_computed_once() -> None:
    """The exponential of an element would be computed for each window that reads it."""
    function = LEFT["max of an exponential"]
    with recording() as record, torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(image("NCHW"))
    kernels = [region for graph in record.graphs for region in graph.plan.fusion.regions]
    assert len(kernels) == 2
