"""The activations on a GPU: the numbers contract by every way, on shapes that hurt, and how they are launched."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from tests.kernels.layouts import layouts
from tests.proving import prove
from tilewright.bench.catalogue import suite
from tilewright.kernels import activation
from tilewright.measure.truth.contract import compare

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(0, 5), (1, 1), (1000, 1), (131, 37), (7, 2049), (333, 1023), (1024, 4096)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gelu_keeps_the_contract(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for name, x in layouts(*shape, dtype, "cuda").items():
        rows = prove(suite("gelu"), activation.gelu, (x.requires_grad_(),))
        assert [row for row in rows if not row.ok] == [], name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_swiglu_keeps_the_contract(shape: tuple[int, int], dtype: torch.dtype) -> None:
    gates, ups = layouts(*shape, dtype, "cuda"), layouts(*shape, dtype, "cuda", seed=1)
    for gate in gates:
        for up in ("contiguous", "strided"):
            inputs = gates[gate].requires_grad_(), ups[up].requires_grad_()
            rows = prove(suite("swiglu"), activation.swiglu, inputs)
            assert [row for row in rows if not row.ok] == [], (gate, up)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu"])
def test_every_16_bit_number(kind: str, dtype: torch.dtype) -> None:
    """Values and slopes at all numbers of 16 bits (as fp32: at all of bf16), NaN and infinities where eager's are."""
    bits = torch.arange(2**16, device=GPU, dtype=torch.int32).to(torch.int16)
    x = bits.view(torch.bfloat16 if dtype == torch.float32 else dtype).to(dtype)
    dy = torch.ones_like(x)
    forward, backward = torch.ops.tilewright.activation, torch.ops.tilewright.activation_backward
    value = activation.formula(x, kind)
    for of in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(of(forward(x, kind)), of(value))
        slope = activation.formula_backward(dy, x, kind)
        assert torch.equal(of(backward(dy, x, kind)), of(slope))
    # Beyond that eager's own overflow on the way differs from one spelling of the formula to another.
    x = x[x.abs() < 1e4]
    truth = activation.formula(x.double(), kind)
    assert compare(forward(x, kind), activation.formula(x, kind), truth).ok
    dy = torch.randn(x.shape, device=GPU).to(dtype)
    truth = activation.formula_backward(dy.double(), x.double(), kind)
    assert compare(backward(dy, x, kind), activation.formula_backward(dy, x, kind), truth).ok


def test_float64_is_pytorchs() -> None:
    x = torch.randn(33, device=GPU, dtype=torch.float64)
    assert torch.equal(activation.gelu(x), F.gelu(x))
    assert torch.equal(activation.swiglu(x, x), F.silu(x) * x)


def test_more_elements_than_31_bits_count() -> None:
    x = torch.full((2**31 + 9,), -3.0, device=GPU, dtype=torch.bfloat16)
    x[-1] = 2.0
    y = activation.gelu(x)
    assert y[-1].item() == pytest.approx(1.9545, abs=0.01)
    assert y[0].item() == pytest.approx(-0.00405, rel=0.01)
    assert y[:-1].eq(y[0]).all()


def test_rows_beyond_31_bits_of_storage() -> None:
    x = torch.zeros(2**21, 2048, device=GPU, dtype=torch.bfloat16)[:, 3:1003]
    x[-1, -1] = 2.0
    y = activation.silu(x)
    assert y[-1, -1].item() == pytest.approx(1.7616, abs=0.01)
    assert y.count_nonzero().item() == 1
