"""Sums of an embedding's gradient in Triton's interpreter."""

import pytest
import torch

from tests.kernels.embeddings import assert_added, assert_sums
from tests.kernels.interpreter import install
from tilewright.kernels.embedding import triton as kernels

install()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 3, 5), (20, 6, 7), (9, 3, 1031)], ids=str)
@pytest.mark.parametrize("padding", [-1, 0])
def test_sums_are_exact_but_for_one_rounding(shape: tuple[int, int, int], dtype: torch.dtype, padding: int) -> None:
    positions, entries, columns = shape
    assert_sums(torch.randn(positions, columns).to(dtype), torch.randint(entries, (positions,)), entries, padding)


def test_long_runs_are_summed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one to forty positions over chunks of four: within one, from end to end, over many."""
    monkeypatch.setattr(kernels, "CHUNK", 4)
    for lengths in ((1, 8, 9, 3, 40), (9, 9, 9), (40,), (2, 11, 2, 12), (7, 8, 0, 25, 1)):
        indices = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        indices = indices[torch.randperm(len(indices), generator=torch.Generator().manual_seed(0))]
        for padding in (-1, 0, 3 % len(lengths)):
            assert_sums(torch.randn(len(indices), 6), indices, len(lengths), padding)


def test_any_layout_of_gradients_and_indices() -> None:
    assert_sums(torch.randn(3, 2, 10)[:, :, ::2], torch.tensor([[3, 0, 3], [1, 1, 2]]).t(), 4)
    for dout in (
        torch.randn(6, 20)[:, 3:12],
        torch.randn(6, 20)[:, ::2],
        torch.randn(9, 6).t(),
        torch.randn(1, 9).expand(6, 9),
    ):
        assert_sums(dout, torch.tensor([3, 0, 3, 1, 1, 2]), 4)


@pytest.mark.parametrize("padding", [-1, 2])
def test_sums_are_added_in_place(monkeypatch: pytest.MonkeyPatch, padding: int) -> None:
    monkeypatch.setattr(kernels, "CHUNK", 4)
    indices = torch.tensor([3, 0, 3, 5] + [2] * 9 + [3] * 14)
    assert_added(torch.randn(7, 70).bfloat16(), torch.randn(len(indices), 70).bfloat16(), indices, padding)
