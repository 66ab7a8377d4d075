"""The textbook product's Triton kernel in Triton's interpreter.

Not in bf16: the interpreter multiplies its bits as if they were integers.
"""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter import install
from tests.kernels.layouts import layouts
from tilewright.kernels.catalogue import suite
from tilewright.kernels.matmul import matmul
from tilewright.measure.truth.proof import prove

install()
SIZES = [(1, 1, 1), (0, 5, 3), (5, 3, 0), (67, 130, 37), (64, 1, 65)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_contract_is_kept(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = sizes
    ways = layouts(m, k, dtype), layouts(k, n, dtype, seed=1)
    for impl in ways[0]:
        rows = prove(suite("matmul"), matmul, (ways[0][impl].requires_grad_(), ways[1][impl].requires_grad_()))
        assert [row for row in rows if not row.ok] == [], impl


def test_nan_and_infinity_spread_as_in_eager() -> None:
    a, b = torch.randn(40, 20), torch.randn(20, 30)
    a[3, 4], a[5, 6], b[7, 8] = float("nan"), float("inf"), float("-inf")
    found, expected = matmul(a, b), a @ b
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())
