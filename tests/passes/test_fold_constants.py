"""Numbers held as tensors: computed once, taken as numbers where the result stays eager's."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.backend.compiling import compiled
from tilewright.backend import recording


def scaled(x: Tensor) -> Tensor:
    scale = torch.sqrt(torch.tensor(x.shape[-1], dtype=torch.float) * 3)
    return x / scale.to(x.dtype) + 1


def promoted(x: Tensor) -> Tensor:
    return x.to(torch.int64) * torch.tensor(0.5, dtype=torch.float64)


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    half = torch.tensor(0.5)
    return x * half, half + 1


def added_to(x: Tensor) -> Tensor:
    total = torch.tensor(2.0)
    total += x.sum()
    return x * total


def assigned(x: Tensor) -> Tensor:
    mask = torch.ones_like(x)
    mask[:, 1:] = 0
    return x * mask


def clipped(x: Tensor) -> Tensor:
    return torch.maximum(x, torch.tensor(0.25, dtype=x.dtype)).fmod(torch.tensor(0.5, dtype=x.dtype))


def subtracted_from(x: Tensor) -> Tensor:
    return torch.tensor(2.0) - x


def chosen(x: Tensor) -> Tensor:
    return torch.where(x > 0, torch.tensor(0.25, dtype=x.dtype), x) + torch.where(x < 1, x, torch.tensor(0.25))


RTOL = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float64: 1e-12}


READS = {scaled: 1, promoted: 1, both: None, added_to: None, assigned: 1, clipped: 1, subtracted_from: 1, chosen: 1}
"""Functions, and what their kernel reads where they become one."""


@pytest.mark.parametrize("dtype", list(RTOL))
@pytest.mark.parametrize("function, reads", READS.items())
def test_results_are_eagers(function: Callable[[Tensor], Tensor], reads: int | None, dtype: torch.dtype) -> None:
    x = torch.randn(5, 16, dtype=dtype)
    with recording() as record:
        call = compiled(function)
        for _ in range(2):
            torch.testing.assert_close(call(x), function(x), rtol=RTOL[dtype], atol=1e-5)
    if reads is not None:
        (graph,) = record.graphs
        (kernel,) = [region.lowered for region in graph.plan.fusion.regions]
        assert len(kernel.inputs) == reads
