"""Sums of an embedding's gradient on a GPU: exact but for one rounding, and the same at every run."""

import pytest
import torch

from tests.gpu.kernels.launching import on_a_side_stream, replayed
from tests.kernels.embeddings import assert_added, assert_sums, sorted_by_index
from tilewright.kernels import embedding as _defines_the_operators  # noqa: F401

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
SIZES = [
    (0, 3, 5),
    (1, 1, 1),
    (1000, 11, 7),
    (4099, 257, 1031),
    (20000, 3, 1024),
    (3000, 50257, 256),
    (20000, 2000, 128),
    (9000, 1001, 16),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("padding", [-1, 0])
def test_sums_are_exact_but_for_one_rounding(sizes: tuple[int, int, int], dtype: torch.dtype, padding: int) -> None:
    positions, entries, columns = sizes
    dout = torch.randn(positions, columns, device=GPU).to(dtype)
    assert_sums(dout, torch.randint(entries, (positions,), device=GPU), entries, padding)


def test_streams_and_graphs_give_the_same_bits() -> None:
    keys, order = sorted_by_index(torch.randint(50, (12000,), device=GPU))
    dout = torch.randn(12000, 300, device=GPU)

    def sums(dout: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.tilewright.embedding_sums(dout, keys, order, 50, -1)
        return found

    plain = sums(dout)
    for way in (on_a_side_stream, replayed):
        assert torch.equal(way(sums, [dout])[0], plain)
    assert torch.equal(sums(dout), plain)


def test_misaligned_and_strided_gradients() -> None:
    indices, drawn = torch.randint(50, (300,), device=GPU), torch.randn(300, 603, device=GPU).bfloat16()
    for dout in (drawn[:, 1:302], drawn.flatten()[1:90001].view(300, 300), drawn[:, ::2], drawn[:, :300].t()):
        assert_sums(dout, indices, 50)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_added_in_place(dtype: torch.dtype) -> None:
    indices = torch.randint(5000, (9000,), device=GPU).clamp(max=3000)
    assert_added(torch.randn(5003, 600, device=GPU).to(dtype), torch.randn(9000, 600, device=GPU).to(dtype), indices)


def test_more_elements_than_31_bits_count() -> None:
    indices = torch.tensor([2**17, 0], device=GPU)
    dout = torch.ones(2, 2**14, device=GPU, dtype=torch.bfloat16)
    found = torch.ops.tilewright.embedding_sums(dout, *sorted_by_index(indices), 2**17 + 1, -1)
    assert found[-1].eq(1).all() and found[0].eq(1).all() and not found[1:-1].any()
