"""Masks that become numbers in C++ kernels: the numbers, and a loop that the compiler vectorises."""

import pytest
import torch

from tests.backend.compiling import compiled
from tilewright.backend import recording


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bfloat16])
def test_a_mask_is_chosen_and_not_converted(dtype: torch.dtype) -> None:
    x = torch.randn(7, 33, generator=torch.Generator().manual_seed(0))

    def counted(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mask = (x > 0.5).to(dtype)
        return mask * 3, (x < 0).sum(1)

    with recording() as record:
        found = compiled(counted)(x)
    for mine, theirs in zip(found, counted(x), strict=True):
        assert torch.equal(mine, theirs)
    (graph,) = record.graphs
    assert any(" ? 1 : 0;" in source for source in graph.plan.sources.values())
