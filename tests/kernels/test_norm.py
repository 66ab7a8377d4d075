"""The norms without a GPU, beside `test_rows.py`: rows of one value, empty ones, gradients of some results."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.proving import prove
from tilewright.bench.catalogue import suite
from tilewright.kernels import norm

CPU = torch.device("cpu")


def inputs_of(name: str, shape: tuple[int, int], dtype: str) -> tuple[Tensor, ...]:
    inputs: tuple[Tensor, ...] = suite(name).workload(shape, dtype).make(CPU, torch.Generator().manual_seed(0))
    return inputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("value", [3.7, 1000.0, 1e-3])
@pytest.mark.parametrize("columns", [5, 999, 5000, 50257])
def test_rows_of_one_value(columns: int, value: float, dtype: str) -> None:
    """Where the true result and the weight's gradient are 0."""
    x, weight, _ = inputs_of("layer_norm", (3, columns), dtype)
    x, bias = torch.full_like(x, value).requires_grad_(), torch.zeros_like(weight, requires_grad=True)
    assert [row for row in prove(suite("layer_norm"), norm.layer_norm, (x, weight, bias)) if not row.ok] == []
    y = norm.layer_norm(x, weight, bias)
    (d_weight,) = torch.autograd.grad(y, weight, torch.randn_like(y))
    assert not y.any() and not d_weight.any()


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (2, 0, 16)], ids=str)
def test_empty(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, requires_grad=True)
    weight, bias = (torch.randn(shape[-1:], requires_grad=True) for _ in range(2))
    y = norm.layer_norm(x, weight, bias)
    assert y.shape == x.shape
    y.sum().backward()
    assert weight.grad is not None and bias.grad is not None
    assert torch.equal(weight.grad, torch.zeros_like(weight))
    assert bias.grad.shape == bias.shape


def test_gradient_through_one_result_only() -> None:
    x, residual, weight = inputs_of("add_rms_norm", (4, 16), "float32")
    with torch.no_grad():
        x[1, 3] = torch.nan
    _, total = norm.add_rms_norm(x, residual, weight)
    ours = torch.autograd.grad(total.sum(), (x, residual, weight))
    assert [gradient.unique().tolist() for gradient in ours] == [[1.0], [1.0], [0.0]], "no NaN"
    x, residual, weight = inputs_of("add_rms_norm", (4, 16), "float32")
    y, _ = norm.add_rms_norm(x, residual, weight)
    true = torch.autograd.grad(F.rms_norm(x + residual, (16,), weight, norm.FLOAT_EPSILON).sum(), (x, residual, weight))
    for a, b in zip(torch.autograd.grad(y.sum(), (x, residual, weight)), true, strict=True):
        torch.testing.assert_close(a, b)


def test_a_result_may_be_written_to() -> None:
    x, residual, weight = inputs_of("add_rms_norm", (4, 16), "float32")
    found = []
    for double in (lambda y: y.mul_(2.0), lambda y: 2.0 * y):
        ends = [double(norm.rms_norm(x, weight)), double(norm.add_rms_norm(x, residual, weight)[0])]
        found.append([*ends, *torch.autograd.grad(ends[0].sum() + ends[1].square().sum(), (x, weight))])
    for written, new in zip(*found, strict=True):
        torch.testing.assert_close(written, new)
