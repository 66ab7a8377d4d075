"""The textbook product on a GPU, in Triton and in CUDA C++."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.gpu.kernels.launching import compiled, on_a_side_stream, replayed, values_of
from tests.kernels.layouts import layouts
from tilewright.kernels.catalogue import suite
from tilewright.kernels.matmul import cuda, matmul
from tilewright.measure.truth.proof import prove

pytestmark = pytest.mark.gpu
SIZES = [(0, 4, 5), (1, 1, 1), (131, 37, 7), (1000, 1, 64), (257, 300, 129), (1024, 520, 2048)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_contract_is_kept(sizes: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, n, k = sizes
    ways = layouts(m, k, dtype, "cuda"), layouts(k, n, dtype, "cuda", seed=1)
    for way in ways[0]:
        rows = prove(suite("matmul"), matmul, (ways[0][way].requires_grad_(), ways[1][way].requires_grad_()))
        assert [row for row in rows if not row.ok] == [], way


@pytest.mark.parametrize("sizes", SIZES[1:], ids=str)
def test_in_cuda(sizes: tuple[int, int, int]) -> None:
    m, n, k = sizes
    for way, a in layouts(m, k, torch.float32, "cuda").items():
        rows = prove(suite("matmul"), cuda.matmul, (a, torch.randn(k, n, device="cuda")))
        assert [row for row in rows if not row.ok] == [], way


def test_launched_in_every_way() -> None:
    given = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for shape in ((300, 72), (72, 264))]
    plain = values_of(matmul, given)
    ways: list[Callable[..., list[torch.Tensor]]] = [on_a_side_stream, replayed, compiled]
    for way in ways:
        for found, expected in zip(way(matmul, given), plain, strict=True):
            torch.testing.assert_close(found, expected)


def test_beyond_32_bits() -> None:
    a, b = (
        torch.randn(2**31 // 8192 + 300, 16, device="cuda").bfloat16(),
        torch.randn(16, 8192, device="cuda").bfloat16(),
    )
    c = matmul(a, b)
    torch.testing.assert_close(c[-64:], a[-64:] @ b)
