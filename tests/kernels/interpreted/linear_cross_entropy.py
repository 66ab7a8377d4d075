"""Linear and cross entropy with its Triton kernels, in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.interpreter import install
from tests.kernels.vocabulary import OPTIONS, Options, by_position, error_of_a_sure_row, inputs
from tilewright.bench.catalogue import suite
from tilewright.kernels.by_recipe import perform_part
from tilewright.kernels.linear_cross_entropy import triton as kernels
from tilewright.measure.truth.proof import prove
from tilewright.operators.own import linear_cross_entropy as row

install()


def loss_and_gradient(*arguments: Any) -> None:
    assert perform_part("loss", kernels.loss_and_gradient, *arguments) == ()


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several chunks of tokens, and several blocks of columns."""
    monkeypatch.setattr(row, "LOGITS_BYTES", 7 * 101 * 2)
    monkeypatch.setattr(kernels, "LONGEST_BLOCK", 32)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_the_contract_is_kept(options: Options, dtype: torch.dtype) -> None:
    for sizes in ((23, 16, 101), (1, 1, 3)):
        rows = prove(suite("linear_cross_entropy"), by_position, (*inputs(*sizes, dtype), *options))
        assert [row for row in rows if not row.ok] == [], sizes


def test_the_z_loss_of_a_sure_row_is_not_rounded_away() -> None:
    assert error_of_a_sure_row() < 5e-7


def test_the_gradient_is_written_over_the_logits() -> None:
    logits, target = torch.randn(3, 40), torch.tensor([5, -100, 39])
    given, losses = logits.clone(), torch.full((3,), float("nan"))
    loss_and_gradient(given, target, losses, torch.tensor(2.0), -100, 0.0, 0.0, True)
    expected = torch.softmax(logits, -1) * 2
    expected[[0, 2], [5, 39]] -= 2
    expected[1] = 0
    torch.testing.assert_close(given, expected)
    torch.testing.assert_close(losses, torch.nn.functional.cross_entropy(logits, target, reduction="none"))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_eagers(value: float) -> None:
    logits, target = torch.randn(3, 70), torch.tensor([0, 1, 69])
    logits[1, 33] = value
    wide = logits.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(wide, target, reduction="none")
    (slope,) = torch.autograd.grad(expected.sum(), wide)
    losses = torch.empty(3)
    loss_and_gradient(logits, target, losses, torch.tensor(1.0), -100, 0.0, 0.0, True)
    torch.testing.assert_close(losses, expected.detach(), equal_nan=True)
    torch.testing.assert_close(logits, slope, equal_nan=True)


def test_a_target_that_is_no_column_gives_nan() -> None:
    losses = torch.empty(2)
    loss_and_gradient(torch.randn(2, 9), torch.tensor([9, 8]), losses, torch.tensor(1.0), -100, 0.0, 0.0, False)
    assert losses.isnan().tolist() == [True, False]


@pytest.mark.parametrize("factor", [1.0, 0.37])
def test_scale(factor: float) -> None:
    x = torch.randn(5000).half()
    expected = (x.float() * factor).half()
    torch.ops.tilewright.scale_gradient_(x, torch.tensor(factor))
    assert torch.equal(x, expected)
