"""Cross entropy in Triton's interpreter, against float64 by the numbers contract."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.losses import OPTIONS, proved, targets
from tests.kernels.rows import SPECIALS, layout
from tilewright.kernels.cross_entropy import by_impl
from tilewright.kernels.cross_entropy import triton as kernels

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ("1x1", "0x7", "5x1", "3x2", "7x33", "3x1031", "every other row", "columns of a wider matrix", "transposed")


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of several tiles, at a length the interpreter can take."""
    monkeypatch.setattr(kernels, "TILE", 256)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", [*SHAPES, *SPECIALS])
def test_numbers_contract(case: str, dtype: torch.dtype) -> None:
    assert [row for row in proved(layout(case, dtype, CPU), {}, "triton") if not row.ok] == []


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any]) -> None:
    assert [row for row in proved(layout("7x33", torch.float16, CPU), options, "triton") if not row.ok] == []


def test_a_label_that_is_no_column_makes_its_row_nan() -> None:
    logits = torch.randn(5, 300, requires_grad=True)
    target = targets(logits)
    target[1] = 300
    losses = by_impl(logits, target, reduction="none", impl="triton")
    (gradient,) = torch.autograd.grad(losses.sum(), logits)
    assert losses.isnan().tolist() == [False, True, False, False, False]
    assert gradient.isnan().all(1).tolist() == [False, True, False, False, False]


def test_the_gradient_of_a_smoothed_label_among_many(monkeypatch: pytest.MonkeyPatch) -> None:
    """The label's share, 1 - ε + ε / columns, must not be the difference of two numbers near 1."""
    monkeypatch.setattr(kernels, "TILE", 65536)
    target = torch.tensor([7])
    found = []
    for dtype, impl in ((torch.float32, "triton"), (torch.float64, "auto")):
        logits = torch.randn(1, 50257, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        loss = by_impl(logits, target, label_smoothing=1.0, reduction="sum", impl=impl)
        found.append(torch.autograd.grad(loss, logits)[0].double())
    torch.testing.assert_close(found[0][0, 7], found[1][0, 7], rtol=2e-6, atol=0)
    assert (found[0] - found[1]).norm() <= 3e-7 * found[1].norm()
