"""The Triton kernels of `examples/` in Triton's interpreter.

The product not in bf16: the interpreter multiplies its bits as if they were integers.
"""

import pytest
import torch

from examples.kernels import gelu, matmul, weighted_sum
from tests.contract import broken
from tests.gpu.kernels.launching import in_turn
from tests.kernels.row_operators import layouts
from tilewright.bench.catalogue import suite

SIZES = [(1, 1, 1), (0, 5, 3), (5, 3, 0), (67, 130, 37), (64, 1, 65)]


@pytest.mark.parametrize(
    ("sizes", "dtype"), in_turn([(sizes,) for sizes in SIZES], [(torch.float32, torch.float16)]), ids=str
)
def test_the_product_keeps_the_contract(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = sizes
    left, right = layouts(m, k, dtype), layouts(k, n, dtype, seed=1)
    for name in left if sizes == SIZES[-2] else ("strided",):
        given = left[name].requires_grad_(), right[name].requires_grad_()
        assert broken(suite("matmul"), given, matmul.in_triton) == [], name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_gelu_keeps_the_contract(dtype: torch.dtype) -> None:
    for name, x in layouts(37, 259, dtype).items():
        assert broken(suite("gelu"), (x.requires_grad_(),), gelu.in_triton) == [], name


def test_nan_and_infinity_spread_as_in_eager() -> None:
    a, b = torch.randn(40, 20), torch.randn(20, 30)
    a[3, 4], a[5, 6], b[7, 8] = float("nan"), float("inf"), float("-inf")
    found, expected = matmul.in_triton(a, b), a @ b
    assert torch.equal(found.isnan(), expected.isnan()) and torch.equal(found.isinf(), expected.isinf())


@pytest.mark.parametrize(
    ("shape", "dtype"),
    in_turn(
        [(shape,) for shape in [(0, 5), (1, 1), (13, 1), (37, 259), (40, 512)]],
        [(torch.float32, torch.bfloat16, torch.float16)],
    ),
    ids=str,
)
def test_the_weighted_sum_keeps_the_contract(shape: tuple[int, int], dtype: torch.dtype) -> None:
    inputs = torch.randn(shape).to(dtype), torch.randn(shape[1]).to(dtype)
    assert broken(suite("weighted_sum"), inputs, weighted_sum.weighted_sum, backward=False) == []
