"""The kernels of `examples/` on a GPU: the numbers contract, and how they are launched."""

import pytest
import torch

from examples.kernels import gelu, matmul, weighted_sum
from tests.contract import broken
from tests.gpu.kernels.launching import DTYPES, in_turn, on_a_side_stream, replayed, values_of
from tests.kernels.row_operators import layouts
from tilewright.bench.catalogue import suite

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
SIZES = [(0, 4, 5), (1, 1, 1), (131, 37, 7), (1000, 1, 64), (257, 300, 129), (1024, 520, 2048)]


@pytest.mark.parametrize(("m", "n", "k", "dtype"), in_turn(SIZES), ids=str)
def test_the_product_in_triton(m: int, n: int, k: int, dtype: torch.dtype) -> None:
    left, right = layouts(m, k, dtype, "cuda"), layouts(k, n, dtype, "cuda", seed=1)
    for name in left:
        assert (
            broken(suite("matmul"), (left[name].requires_grad_(), right[name].requires_grad_()), matmul.in_triton) == []
        ), name


@pytest.mark.parametrize("sizes", SIZES[1:], ids=str)
def test_the_product_in_cuda(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    for name, a in layouts(m, k, torch.float32, "cuda").items():
        assert broken(suite("matmul"), (a, torch.randn(k, n, device="cuda")), matmul.in_cuda) == [], name


@pytest.mark.parametrize(("m", "n", "dtype"), in_turn([(0, 5), (1, 1), (131, 37), (7, 2049), (1024, 4096)]), ids=str)
def test_gelu(m: int, n: int, dtype: torch.dtype) -> None:
    for name, x in layouts(m, n, dtype, "cuda").items():
        assert broken(suite("gelu"), (x.requires_grad_(),), gelu.gelu, gelu.in_triton) == [], name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_weighted_sum(dtype: torch.dtype) -> None:
    for sizes in ((1000, 512), (333, 5000), (1, 1)):
        inputs = torch.randn(sizes, device=GPU).to(dtype), torch.randn(sizes[1], device=GPU).to(dtype)
        assert broken(suite("weighted_sum"), inputs, weighted_sum.weighted_sum, backward=False) == []


def test_streams_and_graphs() -> None:
    product = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in ((300, 72), (72, 264))]
    pointwise = [torch.randn(300, 1000, device=GPU, requires_grad=True)]
    for function, given in ((matmul.in_triton, product), (gelu.gelu, pointwise)):
        plain = values_of(function, given)
        for launched in (on_a_side_stream(function, given), replayed(function, given)):
            for found, expected in zip(launched, plain, strict=True):
                torch.testing.assert_close(found, expected)


def test_the_product_beyond_32_bits() -> None:
    a, b = (
        torch.randn(2**31 // 8192 + 300, 16, device="cuda").bfloat16(),
        torch.randn(16, 8192, device="cuda").bfloat16(),
    )
    c = matmul.in_triton(a, b)
    torch.testing.assert_close(c[-64:], a[-64:] @ b)
