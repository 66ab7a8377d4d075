"""The weighted sum's Triton kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter import install
from tests.kernels.layouts import layouts
from tests.proving import prove
from tilewright.bench.suites.weighted_sum import SUITES
from tilewright.kernels.weighted_sum import weighted_sum

install()
backward = torch.ops.tilewright.weighted_sum_backward.default
SUITE = SUITES["weighted_sum"]
SHAPES = [(0, 5), (1, 1), (13, 1), (1, 2100), (37, 259)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_contract_is_kept(shape: tuple[int, int], dtype: torch.dtype) -> None:
    w = layouts(1, shape[1], dtype, seed=1)["misaligned"][0].requires_grad_()
    for name, x in layouts(*shape, dtype).items():
        rows = prove(SUITE, weighted_sum, (x.requires_grad_(), w))
        assert [row for row in rows if not row.ok] == [], name


def test_only_what_is_wanted_is_computed() -> None:
    dy, x, w = torch.randn(9), torch.randn(9, 33), torch.randn(33)
    dx, nothing = backward(dy, x, w, True, False)
    assert torch.equal(dx, dy[:, None] * w)
    assert nothing.numel() == 0
    nothing, dw = backward(dy, x, w, False, True)
    assert nothing.numel() == 0
    torch.testing.assert_close(dw, dy @ x, rtol=1e-5, atol=1e-5)


def test_no_rows_and_no_columns() -> None:
    w = torch.randn(5, requires_grad=True)
    (dw,) = torch.autograd.grad(weighted_sum(torch.empty(0, 5), w).sum(), w)
    assert torch.equal(dw, torch.zeros(5))
    assert torch.equal(weighted_sum(torch.empty(3, 0), torch.empty(0)), torch.zeros(3))
