"""The generated activations in Triton's interpreter, beside `rows.py`: their tails, special values and layouts."""

import math

import pytest
import torch
import torch.nn.functional as F

from tilewright.kernels import activation
from tilewright.kernels.device import interpreted
from tilewright.measure.truth.contract import compare

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def test_kernels_are_interpreted() -> None:
    assert interpreted()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu"])
def test_slopes_and_tails(kind: str, dtype: torch.dtype) -> None:
    """Where Φ vanishes, where it is one, and in between."""
    x = torch.cat([torch.linspace(-14, 14, 4001), torch.tensor([-1e4, 1e4, 0.0, -0.0])]).to(dtype)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    value = compare(activation._activation(x, kind), activation.formula(x, kind), activation.formula(x.double(), kind))
    truth = activation.formula_backward(dy.double(), x.double(), kind)
    slope = compare(activation._activation_backward(dy, x, kind), activation.formula_backward(dy, x, kind), truth)
    assert value.ok, value
    assert slope.ok, slope


@pytest.mark.parametrize("kind", ["gelu", "gelu_tanh", "silu"])
def test_specials_are_where_the_formulas_are(kind: str) -> None:
    x = torch.tensor([math.inf, -math.inf, math.nan, 3e38, -3e38, 1e20, -1e20, 0.0])
    wanted = {
        "gelu": 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5))),
        "gelu_tanh": 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x * x * x))),
        "silu": x / (1.0 + torch.exp(-x)),
    }[kind]
    found = activation._activation(x, kind)
    for of in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(of(found), of(wanted))


def test_gradients_of_a_broadcast_are_read_as_they_lie() -> None:
    x = torch.randn(5, 33, requires_grad=True)
    (found,) = torch.autograd.grad(activation.silu(x).sum(), x)
    (wanted,) = torch.autograd.grad(F.silu(x).sum(), x)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_geglu_is_gelu_times_up() -> None:
    gate, up = torch.randn(2, 9, 40).chunk(2, dim=-1)
    torch.testing.assert_close(activation.geglu(gate, up), F.gelu(gate) * up, rtol=1e-6, atol=1e-6)
    tanh = activation.geglu(gate, up, "tanh")
    torch.testing.assert_close(tanh, F.gelu(gate, approximate="tanh") * up, rtol=1e-6, atol=1e-6)
