"""The Triton kernels of operators of rows in Triton's interpreter: the numbers contract on matrices that hurt."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.gpu.kernels.launching import in_turn
from tests.kernels.losses import OPTIONS, targets, wrong_losses
from tests.kernels.row_operators import CALLS, NORMS, layout, wrong
from tilewright.kernels import by_recipe, norm
from tilewright.kernels.cross_entropy import by_impl
from tilewright.kernels.cross_entropy import triton as cross_entropy
from tilewright.kernels.weighted_sum import weighted_sum

CPU = torch.device("cpu")
ALIKE = ("gelu", "log_softmax", "rms_norm", "add_layer_norm", "add_rms_norm")
"""Generated as swiglu, softmax and layer norm are: every third of their cases."""
INTERPRETED = [
    (name, case) for i, (name, case) in enumerate(CALLS) if name != "dropout_add" and not (name in ALIKE and i % 3)
]
"""Dropout draws its mask on a GPU: `dropout_add.py`."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several programs for few rows, and rows that no program holds, at lengths that the interpreter can take."""
    monkeypatch.setattr(cross_entropy, "TILE", 256)
    by_recipe._built.cache_clear()
    yield
    by_recipe._built.cache_clear()


@pytest.mark.parametrize(("name", "case", "dtype"), in_turn(INTERPRETED, [(torch.float32, torch.bfloat16)]), ids=str)
def test_the_numbers_contract(name: str, case: str, dtype: torch.dtype) -> None:
    assert wrong(name, layout(case, dtype, CPU)) == []


@pytest.mark.parametrize("name", dict(INTERPRETED))
def test_fp16(name: str) -> None:
    assert wrong(name, layout("3x1031", torch.float16, CPU)) == []


@pytest.mark.parametrize(
    ("columns", "value"), [(5, 1000.1), (97, 3.7), (97, 1e-3), (999, 3.7), (999, 1000.1), (999, 1e-3)]
)
def test_a_row_of_one_value(columns: int, value: float) -> None:
    """Whose true result is the bias, and whose part of the weight's gradient is 0."""
    for dtype in (torch.float32, torch.bfloat16):
        x = layout(f"3x{columns}", dtype, CPU)
        x[1] = value
        assert wrong("layer_norm", x) == []
    alone = torch.full((3, columns), value).requires_grad_()
    weight = torch.randn(columns, requires_grad=True)
    y = norm.layer_norm(alone, weight)
    assert not y.any() and not torch.autograd.grad(y, weight, torch.randn_like(y))[0].any()


@pytest.mark.parametrize("name", NORMS)
def test_norms_without_weights(name: str) -> None:
    x, residual = torch.randn(2, 6, 50).unbind()
    given = (x, residual)[: 1 + name.startswith("add")]
    total, function = sum(given), getattr(norm, name)
    true = torch.nn.functional.layer_norm if "layer" in name else torch.nn.functional.rms_norm
    found = function(*given)
    torch.testing.assert_close(found[0] if name.startswith("add") else found, true(total, (50,)))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_of_cross_entropy(options: dict[str, Any]) -> None:
    assert wrong_losses(layout("7x33", torch.float16, CPU), options, "triton") == []


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
    monkeypatch.setattr(cross_entropy, "TILE", 65536)
    target = torch.tensor([7])
    found = []
    for dtype, impl in ((torch.float32, "triton"), (torch.float64, "auto")):
        logits = torch.randn(1, 50257, generator=torch.Generator().manual_seed(0)).to(dtype).requires_grad_()
        loss = by_impl(logits, target, label_smoothing=1.0, reduction="sum", impl=impl)
        found.append(torch.autograd.grad(loss, logits)[0].double())
    torch.testing.assert_close(found[0][0, 7], found[1][0, 7], rtol=2e-6, atol=0)
    assert (found[0] - found[1]).norm() <= 3e-7 * found[1].norm()


def test_only_the_gradient_that_is_wanted_is_computed() -> None:
    backward = torch.ops.tilewright.weighted_sum_backward.default
    dy, x, w = torch.randn(9), torch.randn(9, 33), torch.randn(33)
    dx, nothing = backward(dy, x, w, True, False)
    assert torch.equal(dx, dy[:, None] * w) and nothing.numel() == 0
    nothing, dw = backward(dy, x, w, False, True)
    assert nothing.numel() == 0
    torch.testing.assert_close(dw, dy @ x, rtol=1e-5, atol=1e-5)


def test_no_rows_and_no_columns() -> None:
    w = torch.randn(5, requires_grad=True)
    (dw,) = torch.autograd.grad(weighted_sum(torch.empty(0, 5), w).sum(), w)
    assert torch.equal(dw, torch.zeros(5))
    assert torch.equal(weighted_sum(torch.empty(3, 0), torch.empty(0)), torch.zeros(3))
