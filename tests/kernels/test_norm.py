"""The norms without a GPU: formulas, registration, and the Triton kernels' machine code for an H200."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.kernels import machine_code
from tests.proving import prove
from tilewright.bench.catalogue import suite
from tilewright.kernels import norm

NAMES = ("layer_norm", "rms_norm", "add_layer_norm", "add_rms_norm")
SHAPES = ((7, 37), (1, 1), (5, 1), (3, 257), (64, 128))
CPU = torch.device("cpu")


def inputs_of(name: str, shape: tuple[int, int], dtype: str) -> tuple[Tensor, ...]:
    inputs: tuple[Tensor, ...] = suite(name).workload(shape, dtype).make(CPU, torch.Generator().manual_seed(0))
    return inputs


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_formulas_keep_the_numbers_contract(name: str, shape: tuple[int, int], dtype: str) -> None:
    rows = prove(suite(name), suite(name).variant("tilewright").function, inputs_of(name, shape, dtype))
    assert len(rows) == (2 if name.startswith("add") else 1) + len(inputs_of(name, shape, dtype))
    assert [row for row in rows if not row.ok] == []


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


@pytest.mark.parametrize("optional", ["all", "weight", "none"])
@pytest.mark.parametrize("centered", [True, False])
def test_operators_are_registered_well(centered: bool, optional: str) -> None:
    x, residual = (torch.randn(3, 5, 8, requires_grad=True) for _ in range(2))
    weight = torch.randn(8, requires_grad=True) if optional != "none" else None
    bias = torch.randn(8, requires_grad=True) if optional == "all" else None
    ops = torch.ops.tilewright
    torch.library.opcheck(ops.norm.default, (x, weight, bias, 1e-5, centered))
    torch.library.opcheck(ops.add_norm.default, (x, residual, weight, bias, 1e-5, centered))
    _, mean, rstd = ops.norm(x.detach(), weight, bias, 1e-5, centered)
    arguments = (torch.randn_like(x), x.detach(), residual.detach(), weight, bias is not None, mean, rstd, centered)
    detached = tuple(value.detach() if isinstance(value, Tensor) else value for value in arguments)
    torch.library.opcheck(ops.norm_backward.default, detached)


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


@pytest.mark.parametrize(
    "direction, columns", [("forward", 256), ("forward", 16384), ("backward", 256), ("backward", 8192)]
)
def test_triton_kernels_compile_without_spills(direction: str, columns: int) -> None:
    """A layer norm of bf16, which has the most to keep in registers."""
    pytest.importorskip("triton")
    from tilewright.kernels.norm import triton

    kernel = getattr(triton, f"{direction}_rows")
    tile = triton.tile_of(columns, direction)
    constants = {"CENTERED": True, "HAS_WEIGHT": True, "HAS_BIAS": True, "RESIDUAL": False}
    constants |= {"BLOCK_ROWS": tile.rows, "BLOCK": tile.columns}
    narrow = ("x", "residual", "y", "total", "weight", "bias", "dy", "dsum", "dx")
    types = dict.fromkeys(kernel.arg_names, "i32") | dict.fromkeys(narrow, "*bf16") | {"eps": "fp32"}
    types |= dict.fromkeys(("means", "rstds", "partial"), "*fp32")
    assert machine_code.spilled(machine_code.compiled(kernel, types, constants, warps=tile.warps)) == 0


def test_the_sum_over_programs_compiles() -> None:
    pytest.importorskip("triton")
    from tilewright.kernels.column_sums import MOST_PARTS, TILE, column_sums

    types = {"parts": "*fp32", "first": "*bf16", "second": "*bf16", "count": "i32", "columns": "i32"}
    sizes = {"PARTS": MOST_PARTS, "COLUMNS": TILE // MOST_PARTS}
    assert machine_code.spilled(machine_code.compiled(column_sums, types, sizes)) == 0
