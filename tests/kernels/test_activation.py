"""The activations without a GPU: formulas, registration, and machine code for an H200."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.layouts import layouts
from tests.kernels.machine_code import compiled, spilled
from tests.proving import prove
from tilewright.bench.catalogue import suite
from tilewright.kernels import activation
from tilewright.kernels.activation import reference
from tilewright.kernels.activation.triton import Rows, rows_of
from tilewright.launch.builder import RecipeBuilder, operands_of

UNARY = {"gelu": reference.gelu, "silu": reference.silu}
GATED = {"swiglu": reference.swiglu, "geglu": reference.geglu}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["gelu", "swiglu"])
def test_formulas_keep_the_numbers_contract(name: str, dtype: torch.dtype) -> None:
    first, second = layouts(7, 37, dtype), layouts(7, 37, dtype, seed=1)
    for way in first:
        inputs = [first[way].requires_grad_(), second[way].requires_grad_()][: 1 if name == "gelu" else 2]
        rows = prove(suite(name), getattr(activation, name), inputs)
        assert [row for row in rows if not row.ok] == [], way


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_references_are_pytorchs(approximate: str) -> None:
    x = torch.linspace(-6, 6, 101, dtype=torch.float64)
    gelu = torch.nn.functional.gelu(x, approximate=approximate)
    torch.testing.assert_close(reference.gelu(x, approximate), gelu)
    torch.testing.assert_close(reference.silu(x), torch.nn.functional.silu(x))
    torch.testing.assert_close(activation.geglu(x, x, approximate), gelu * x)


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu"])
def test_operators_are_registered_well(kind: str) -> None:
    x, y = torch.randn(3, 5, requires_grad=True), torch.randn(5, 3, requires_grad=True).t()
    ops = torch.ops.tilewright
    torch.library.opcheck(ops.activation.default, (x, kind))
    torch.library.opcheck(ops.gated_activation.default, (x, y, kind))
    torch.library.opcheck(ops.activation_backward.default, (y.detach(), x.detach(), kind))
    torch.library.opcheck(ops.gated_activation_backward.default, (y.detach(), x.detach(), x.detach(), kind))


def test_rows_are_found_in_each_layout() -> None:
    def found_of(*tensors: torch.Tensor) -> Rows:
        operands = operands_of(tensors)
        return rows_of(RecipeBuilder("rows", operands, compiled=False), *operands)

    found = {name: found_of(x) for name, x in layouts(6, 10, torch.float32).items()}
    assert [(name, rows.count, rows.columns, *rows.strides) for name, rows in found.items()] == [
        ("contiguous", 1, 60, 60),
        ("misaligned", 1, 60, 60),
        ("strided", 6, 10, 23),
        ("transposed", 6, 10, 10),
        ("every other", 6, 10, 10),
    ]
    gate, up = torch.randn(2, 3, 20).chunk(2, -1)
    rows = found_of(gate, up)
    assert rows.strides == (20, 20)
    # Where it lies: tensor 1 is no copy.
    assert rows.tensors[1].index == 1 and found_of(gate.mT, up.mT).tensors[1].index == 3


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("is_gated", [False, True])
@pytest.mark.parametrize("name", ["forward", "backward"])
def test_triton_kernels_compile_without_spills(name: str, is_gated: bool, dtype: str) -> None:
    pytest.importorskip("triton")
    from tilewright.kernels.activation import triton as kernels

    kernel = getattr(kernels, name)
    types = {argument: f"*{dtype}" for argument in ("x", "y", "dx", "dy", "up", "dup")}
    types |= {argument: "i64" for argument in ("columns", "x_row", "dy_row", "up_row")}
    constants = {"KIND": "gelu", "PRECISE": dtype == "fp32", "BLOCK": kernels.BLOCK, "FLAT": True}
    constants |= {} if is_gated else {"up": None, "dup": None}
    code = compiled(kernel, types, constants, warps=kernels.WARPS)
    assert spilled(code) == 0
    assert "ld.global.v4.b32" in code.asm["ptx"]
