"""Tests of every suite."""

import pytest
import torch

from tilewright import backend
from tilewright.bench.catalogue import SUITES, suite

WITHOUT_GENERATED = {"attention", "attention_decode"}
"""A compiled program calls PyTorch's fused attention or ours."""
SMALL = {"linear_cross_entropy": (6, 8, 11)}


def small(name: str) -> tuple[int, ...]:
    return SMALL.get(name, (6, 16, 8)[: len(suite(name).sizes[0])])


@pytest.mark.parametrize("name", sorted(set(SUITES) - WITHOUT_GENERATED))
def test_the_generated_program_is_compiled_whole_and_right(name: str) -> None:
    """Nothing is left to PyTorch, and no operator of tilewright's own is called."""
    found = suite(name)
    inputs = found.workload(small(name), "float32").make(torch.device("cpu"), torch.Generator().manual_seed(0))
    with backend.recording() as record:
        torch.manual_seed(0)
        ours = found.variant("generated").function(*inputs)
    assert record.graphs and record.fallbacks == []
    targets = [str(node.target) for graph in record.graphs for node in graph.plan.graph.nodes]
    assert targets and not [target for target in targets if target.startswith("tilewright.")]
    torch.manual_seed(0)
    eager = next(variant for variant in found.variants if variant.name in ("torch", "eager"))
    torch.testing.assert_close(ours, eager.function(*inputs))
