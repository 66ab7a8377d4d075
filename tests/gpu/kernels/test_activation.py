"""The activations on a GPU, beside `test_rows.py`: every number of 16 bits."""

import pytest
import torch
from torch.nn import functional as F

from tilewright.kernels import activation
from tilewright.measure.truth.contract import compare

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


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
