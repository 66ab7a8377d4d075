"""Pooling, compiled: eager's values, positions and gradients, and which windows become kernels on a CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.operators.pools import APART, LAYOUTS, LEFT, OVERLAPPING, differences, image
from tilewright.backend import backend, recording


def calls(record: Any) -> set[str]:
    """Poolings that PyTorch computes."""
    launched = [what for graph in record.graphs for name, what in graph.plan.launches() if what != "kernel"]
    return {what for what in launched if "pool" in what}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", [*APART, *OVERLAPPING, *LEFT])
def test_values_positions_and_gradients_are_eagers(name: str, layout: str) -> None:
    function = {**APART, **OVERLAPPING, **LEFT}[name]
    with recording() as record:
        assert differences(function, torch.compile(function, backend=backend, fullgraph=True), image(layout)) == []
    assert bool(calls(record)) == (name not in APART and name != "max of an exponential")


def test_a_costly_operand_is_computed_once() -> None:
    """The exponential of an element would be computed for each window that reads it."""
    function = LEFT["max of an exponential"]
    with recording() as record, torch.no_grad():
        torch.compile(function, backend=backend, fullgraph=True)(image("NCHW"))
    kernels = [region for graph in record.graphs for region in graph.plan.fusion.regions]
    assert len(kernels) == 2
