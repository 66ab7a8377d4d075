"""Softmax and log-softmax on a GPU: the numbers contract by every impl, on shapes that hurt, and how they launch."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.kernels.rows import LAYOUTS, SPECIALS, layout
from tests.proving import prove
from tilewright.bench.suites.softmax import COLUMNS, SUITES
from tilewright.hardware.architectures import limits_of
from tilewright.kernels.softmax import by_impl
from tilewright.kernels.softmax.cuda import longest

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IMPLS = ("triton", "cuda")
LENGTHS = (1, 2, 3, 31, 127, 300, 1000, *COLUMNS, 100003, 500000, 524289, 1048576)


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*LAYOUTS, *SPECIALS])
def test_numbers_contract(name: str, impl: str, dtype: torch.dtype, case: str) -> None:
    x = layout(case, dtype, GPU).requires_grad_()
    assert [row for row in prove(SUITES[name], _function(name, impl), [x]) if not row.ok] == []


@pytest.mark.parametrize("name", SUITES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", LENGTHS)
def test_every_length_of_row(name: str, dtype: torch.dtype, columns: int) -> None:
    """By both ways, contiguous and in rows that start anywhere modulo 16 bytes."""
    rows = max(2, min(1000, 2**22 // columns))
    generator = torch.Generator(GPU).manual_seed(columns)
    storage = torch.randn(rows * (columns + 3) + 1, dtype=dtype, device=GPU, generator=generator)
    inputs = (storage[: rows * columns].view(rows, columns), storage[1:].view(rows, columns + 3)[:, :columns])
    for x in inputs:
        for impl in IMPLS if columns * dtype.itemsize <= longest("backward", limits_of(GPU)) else ("auto", "triton"):
            assert [row for row in prove(SUITES[name], _function(name, impl), [x.requires_grad_()]) if not row.ok] == []


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(2**21 + 3, 1024), (2**14 + 1, 131072)], ids=str)
def test_past_32_bits(impl: str, shape: tuple[int, int]) -> None:
    """Rows beyond the elements that 32 bits can count."""
    x = torch.randn(shape, device=GPU, dtype=torch.bfloat16)
    y = by_impl(x, log=False, impl=impl)
    torch.testing.assert_close(y[-5:].float(), x[-5:].float().softmax(-1), rtol=2**-8, atol=1e-7)
    dy = torch.ones_like(y)
    dy[-1, 0] = 2
    dx = torch.ops.tilewright.softmax_backward(y, dy, False, impl)
    last, weights = y[-1].float(), dy[-1].float()
    wanted = last * (weights - (last * weights).sum())
    torch.testing.assert_close(dx[-1].float(), wanted, rtol=2**-8, atol=1e-6)


def _function(name: str, impl: str) -> functools.partial[torch.Tensor]:
    return functools.partial(by_impl, log=name == "log_softmax", impl=impl)
