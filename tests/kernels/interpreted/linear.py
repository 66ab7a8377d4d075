"""The linear layer with GELU in plain Triton, in Triton's interpreter.

Not in bf16: the interpreter multiplies its bits as if they were integers.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter import install
from tilewright.kernels.catalogue import suite
from tilewright.kernels.linear.triton import linear_gelu
from tilewright.measure.truth.proof import prove

install()


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("sizes", [(1, 8, 8), (200, 264, 72), (129, 512, 128)], ids=str)
def test_the_contract_is_kept(sizes: tuple[int, int, int], approximate: str) -> None:
    m, n, k = sizes
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).half() for shape in ((m, k), (n, k), (n,)))
    rows = prove(suite("linear_gelu"), linear_gelu, (x, weight / k**0.5, bias, approximate))
    assert [row for row in rows if not row.ok] == []


def test_without_bias() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 16, generator=generator).half(), torch.randn(24, 16, generator=generator).half()
    true = torch.nn.functional.gelu(x.double() @ weight.double().t())
    # Rounded once, to fp16, from what is within 2.9e-5 of it.
    torch.testing.assert_close(linear_gelu(x, weight, None).double(), true, rtol=2**-10, atol=2**-15)
