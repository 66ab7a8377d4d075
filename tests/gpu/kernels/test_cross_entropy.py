"""Cross entropy on a GPU: the numbers contract by every impl, on shapes that hurt, and how it is launched."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.losses import OPTIONS, proved, targets
from tests.kernels.rows import SPECIALS, layout
from tilewright.bench.suites.softmax import COLUMNS
from tilewright.kernels.cross_entropy import by_impl

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
IMPLS = ("triton", "cuda")
SHAPES = ("1x1", "0x7", "5x1", "3x2", "7x33", "3x1031", "every other row", "columns of a wider matrix", "transposed",
          "one element in", "one row of many")  # fmt: skip


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*SHAPES, *SPECIALS])
def test_numbers_contract(impl: str, dtype: torch.dtype, case: str) -> None:
    assert [row for row in proved(layout(case, dtype, GPU), {}, impl) if not row.ok] == []


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ["5x1", "7x33", "3x1031"])
def test_options(impl: str, dtype: torch.dtype, options: dict[str, Any], case: str) -> None:
    assert [row for row in proved(layout(case, dtype, GPU), options, impl) if not row.ok] == []


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [1, 2, 3, 31, 127, 128, 300, 320, 379, 1000, *COLUMNS, 524289, 1048576])
def test_every_number_of_classes(dtype: torch.dtype, columns: int) -> None:
    rows = max(2, min(5000, 2**22 // columns))
    generator = torch.Generator(GPU).manual_seed(columns)
    storage = torch.randn(rows * (columns + 3) + 1, dtype=dtype, device=GPU, generator=generator)
    inputs = (storage[: rows * columns].view(rows, columns), storage[1:].view(rows, columns + 3)[:, :columns])
    for logits in inputs:
        for impl in IMPLS:
            assert [row for row in proved(logits.detach(), {}, impl) if not row.ok] == []


@pytest.mark.parametrize("rows", [1, 31, 32, 33, 257, 40000, 2**20 + 5])
def test_every_number_of_rows(rows: int) -> None:
    """Of short rows, which lanes end together, as many at a time as lanes share a row."""
    logits = torch.randn(rows, 128, device=GPU, generator=torch.Generator(GPU).manual_seed(rows))
    target = torch.randint(128, (rows,), device=GPU)
    target[3::5] = -100
    wanted = torch.nn.functional.cross_entropy(logits.double(), target, reduction="none")
    losses = by_impl(logits, target, reduction="none", impl="cuda")
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-6, atol=1e-6)
    mean = torch.nn.functional.cross_entropy(logits.double(), target)
    torch.testing.assert_close(by_impl(logits, target, impl="cuda").double(), mean, rtol=1e-6, atol=0)


@pytest.mark.parametrize("impl", IMPLS)
def test_a_label_that_is_no_column_makes_its_row_nan(impl: str) -> None:
    logits = torch.randn(5, 300, device=GPU, requires_grad=True)
    target = targets(logits)
    target[1] = 300
    losses = by_impl(logits, target, reduction="none", impl=impl)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert losses.isnan().tolist() == [False, True, False, False, False]
    assert gradient.isnan().all(1).tolist() == [False, True, False, False, False]


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("shape", [(2**21 + 3, 1024), (2**14 + 1, 131072)], ids=str)
def test_past_32_bits(impl: str, shape: tuple[int, int]) -> None:
    """Rows beyond the elements that 32 bits can count."""
    logits = torch.randn(shape, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    target = torch.randint(shape[1], shape[:1], device=GPU)
    losses = by_impl(logits, target, reduction="none", impl=impl)
    last = logits.detach()[-5:].float().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(last, target[-5:], reduction="none")
    torch.testing.assert_close(losses[-5:].float(), wanted, rtol=2**-8, atol=0)
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    (true,) = torch.autograd.grad(wanted.sum(), last)
    torch.testing.assert_close(gradient[-5:].float(), true, rtol=2**-7, atol=1e-7)
