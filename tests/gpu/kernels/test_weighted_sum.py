"""The weighted sum on a GPU: the numbers contract on shapes that hurt, and how it is launched."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.layouts import layouts
from tests.proving import prove
from tilewright.bench.catalogue import suite
from tilewright.kernels.weighted_sum import weighted_sum

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
SHAPES = [(0, 5), (1, 1), (1000, 1), (1, 100003), (131, 37), (1000, 512), (333, 5000), (4096, 4096), (100003, 64)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_numbers_contract(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = layouts(1, shape[1], dtype, "cuda", seed=1)["misaligned"][0].requires_grad_()
    for way, x in layouts(*shape, dtype, "cuda").items():
        rows = prove(suite("weighted_sum"), weighted_sum, (x.requires_grad_(), w))
        assert [row for row in rows if not row.ok] == [], way


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_specials_are_where_eagers_are(value: float) -> None:
    x, w = torch.randn(33, 257, device=GPU), torch.randn(257, device=GPU)
    x[3, 5] = value
    w[7] = value
    inputs = x.requires_grad_(), w.requires_grad_()
    assert all(row.ok for row in prove(suite("weighted_sum"), weighted_sum, inputs))


def test_more_elements_than_31_bits_count() -> None:
    x = torch.zeros(2**17 + 1, 2**14, device=GPU, dtype=torch.bfloat16)
    x[-1, -1] = 2.0
    w = torch.full((2**14,), 3.0, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    y = weighted_sum(x.requires_grad_(), w)
    assert y[-1].item() == 6.0
    assert y[:-1].count_nonzero().item() == 0
    dx, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    assert dw[-1].item() == 2.0
    assert dw[:-1].count_nonzero().item() == 0
    assert torch.equal(dx[-1], w)
