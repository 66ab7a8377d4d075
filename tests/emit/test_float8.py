"""Floats of 8 bits in C++ nests; in Triton's they are tested with the interpreter."""

import pytest
import torch

from tests.emit.float8 import FLOAT8, SOURCES, conversions, same
from tests.emit.triton_programs import nests_of
from tilewright.backend import backend


@pytest.mark.parametrize("source", SOURCES, ids=str)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_conversions_are_eagers(dtype: torch.dtype, source: torch.dtype) -> None:
    for function, x in conversions(dtype, source):
        assert len(nests_of(function, x)) == 1
        assert same(torch.compile(function, backend=backend)(x), function(x))


def test_a_scaled_product_of_floats_of_8_bits() -> None:
    """Quantised in kernels, with the gradient of what is not quantised; the product is PyTorch's."""

    def quantised(x: torch.Tensor) -> torch.Tensor:
        scale = 448 / x.detach().abs().amax().clamp(min=1e-5)
        rounded = (x.detach() * scale).to(torch.float8_e4m3fn).float() / scale
        return x + (rounded - x).detach()

    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return quantised(x) @ quantised(w).T

    inputs = [torch.randn(n, 64, requires_grad=True) for n in (48, 32)]
    with torch.no_grad():
        compiled = torch.compile(function, backend=backend)
    y, expected = compiled(*inputs), function(*inputs)
    torch.testing.assert_close(y, expected)
    dy = torch.randn_like(y)
    for a, b in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(expected, inputs, dy), strict=True):
        torch.testing.assert_close(a, b)
