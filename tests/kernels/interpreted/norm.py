"""The Triton kernels of the norms in Triton's interpreter: the numbers contract on shapes that hurt."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.proving import prove
from tilewright.bench.catalogue import suite
from tilewright.kernels import by_recipe, norm
from tilewright.kernels.norm import triton

NAMES = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Several programs for few rows."""
    monkeypatch.setattr(triton, "TILE", 128)
    by_recipe._built.cache_clear()
    yield
    by_recipe._built.cache_clear()


def inputs_of(name: str, shape: tuple[int, int], dtype: str) -> tuple[Tensor, ...]:
    inputs: tuple[Tensor, ...] = suite(name).workload(shape, dtype).make(CPU, torch.Generator().manual_seed(1))
    return inputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(7, 37), (5, 1), (3, 97)], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_kernels_keep_the_numbers_contract(name: str, shape: tuple[int, int], dtype: str) -> None:
    rows = prove(suite(name), suite(name).variant("tilewright").function, inputs_of(name, shape, dtype))
    assert [row for row in rows if not row.ok] == []


def test_rows_at_a_distance_and_misaligned() -> None:
    storage = torch.randn(5000, dtype=torch.float32).bfloat16()
    x = storage[1:].as_strided((8, 45), (60, 1)).requires_grad_()
    weight, bias = torch.randn(45).requires_grad_(), torch.randn(45).requires_grad_()
    rows = prove(suite("layer_norm"), norm.layer_norm, (x, weight, bias))
    assert [row for row in rows if row.tensor != "output 0" and not row.ok] == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
@pytest.mark.parametrize("name", ["layer_norm", "rms_norm"])
def test_specials_are_where_eagers_are(name: str, value: float) -> None:
    inputs = inputs_of(name, (3, 70), "float32")
    with torch.no_grad():
        inputs[0][1, 40] = value
    rows = prove(suite(name), suite(name).variant("tilewright").function, inputs)
    assert [row for row in rows if not row.ok] == []


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [3.7, 1000.0, 1e-3])
@pytest.mark.parametrize("columns", [5, 97, 999])
def test_rows_of_one_value(columns: int, value: float, dtype: str) -> None:
    """All rows, where the true result and the weight's gradient are 0, and one."""
    drawn, weight, _ = inputs_of("layer_norm", (3, columns), dtype)
    bias = torch.zeros_like(weight, requires_grad=True)
    whole, one = torch.full_like(drawn, value).requires_grad_(), drawn.detach().clone()
    one[1] = value
    for x in (whole, one.requires_grad_()):
        assert [row for row in prove(suite("layer_norm"), norm.layer_norm, (x, weight, bias)) if not row.ok] == []
    y = norm.layer_norm(whole, weight, bias)
    (d_weight,) = torch.autograd.grad(y, weight, torch.randn_like(y))
    assert not y.any() and not d_weight.any()


def test_half_precision() -> None:
    inputs = inputs_of("add_layer_norm", (6, 50), "float16")
    assert [row for row in prove(suite("add_layer_norm"), norm.add_layer_norm, inputs) if not row.ok] == []


def test_no_weights() -> None:
    x = torch.randn(6, 50, requires_grad=True)
    y = norm.layer_norm(x)
    torch.testing.assert_close(y, torch.nn.functional.layer_norm(x, (50,)))
    torch.testing.assert_close(
        torch.autograd.grad(y.square().sum(), x),
        torch.autograd.grad(torch.nn.functional.layer_norm(x, (50,)).square().sum(), x),
    )
