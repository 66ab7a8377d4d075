"""Sums at computed places and of embeddings without a GPU: the formula, and machine code for an H200."""

import itertools

import pytest
import torch

from tests.gpu.kernels.launching import in_turn
from tests.kernels.embeddings import assert_sums
from tests.kernels.nvcc import build
from tilewright.kernels import segment_reduce as _defines_the_operators  # noqa: F401
from tilewright.kernels.scatter_sums import cuda, scatter_sums


@pytest.mark.parametrize(
    ("shape", "dtype"),
    in_turn(
        [(shape,) for shape in [(7, 33), (2, 3, 5), (1, 1), (4, 0), (0, 4), (9,)]],
        [(torch.float32, torch.bfloat16, torch.float16, torch.float64)],
    ),
    ids=str,
)
def test_sums_are_those_of_float64(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    source = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    index = torch.randint(0, 5, shape, generator=generator)
    true = torch.zeros(*shape[:-1], 5, dtype=torch.float64).scatter_add_(-1, index, source.double())
    found = scatter_sums(source, index.int(), 5)
    assert found.dtype is dtype and found.shape == true.shape
    torch.testing.assert_close(found, true.to(dtype))


def test_it_has_no_derivative() -> None:
    index = torch.tensor([[1, 0, 1]]).expand(4, 3)
    with pytest.raises(NotImplementedError, match="has no derivative"):
        scatter_sums(torch.randn(4, 3, requires_grad=True), index, 5).sum().backward()


@pytest.mark.parametrize(
    ("dtype", "group", "across"),
    [(torch.float32, 1, False), (torch.float32, 4, True), (torch.bfloat16, 1, True), (torch.bfloat16, 4, False)],
)
def test_no_kernel_spills(dtype: torch.dtype, group: int, across: bool) -> None:
    assert build(cuda.SOURCE, cuda.definitions(dtype, torch.int64, group, across)).spilled == {"scatter_sums": 0}


@pytest.mark.parametrize(
    ("padding", "sizes", "dtype"),
    in_turn(
        itertools.product([-1, 0], [(0, 3, 5), (1, 1, 1), (50, 11, 7), (4, 3, 0)]),
        [(torch.float32, torch.bfloat16, torch.float16, torch.float64)],
    ),
    ids=str,
)
def test_sums_are_exact_but_for_one_rounding(sizes: tuple[int, int, int], dtype: torch.dtype, padding: int) -> None:
    positions, entries, columns = sizes
    assert_sums(torch.randn(positions, columns).to(dtype), torch.randint(entries, (positions,)), entries, padding)
