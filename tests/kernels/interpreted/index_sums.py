"""The kernels that add at computed places, also an embedding's gradient, in Triton's interpreter."""

import itertools

import pytest
import torch
from torch import Tensor

from tests.gpu.kernels.launching import in_turn
from tests.kernels.embeddings import assert_added, assert_extremes, assert_sums
from tilewright.kernels.index_sums import index_sums
from tilewright.kernels.index_sums import triton as kernels
from tilewright.kernels.segment_reduce import triton as segment_kernels

SHAPES = [(1, 40, 130), (3, 21, 96), (2, 17, 5), (1, 33, 1), (2, 0, 7), (0, 3, 5), (1, 70, 300)]


def exact(source: Tensor, index: Tensor, extent: int) -> Tensor:
    total = torch.zeros(source.shape[0], extent, source.shape[2], dtype=torch.float64)
    return total.scatter_add_(1, index.long() % extent, source.double())


@pytest.mark.parametrize(
    ("kind", "shape", "dtype"),
    in_turn(
        itertools.product(["rows", "sorted", "rows of each", "elements", "one place", "negative"], SHAPES),
        [(torch.float32, torch.bfloat16, torch.float16)],
    ),
    ids=str,
)
def test_sums_are_those_of_float64(kind: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    outer, positions, columns = shape
    extent = 6
    source = torch.randn(2 * outer, positions, columns + 3, generator=generator).to(dtype)[::2, :, 2:-1]
    low, high = (-extent, extent) if kind == "negative" else (2, 3) if kind == "one place" else (0, extent)
    drawn = {"rows of each": (outer, positions, 1), "elements": shape}.get(kind, (1, positions, 1))
    index = torch.randint(low, high, drawn, generator=generator)
    index = (index.sort(1)[0] if kind == "sorted" else index).expand(shape)
    found = index_sums(source, index.int() if kind == "rows" else index, extent, kind == "negative")
    assert found.dtype == torch.float32 and found.shape == (outer, extent, columns)
    torch.testing.assert_close(found.double(), exact(source, index, extent), rtol=1e-5, atol=1e-5)


def test_infinities_stay_where_they_are_added() -> None:
    source, index = torch.ones(1, 4, 128), torch.tensor([1, 0, 1, 2]).view(1, 4, 1).expand(1, 4, 128)
    source[0, 1, 5], source[0, 2, 7] = torch.inf, torch.nan
    found = index_sums(source, index, 3)
    assert found[0, 0, 5] == torch.inf and found[0, 1, 7].isnan()
    assert int(found.isfinite().logical_not().sum()) == 2


def test_tiles_end_where_rows_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and columns over several tiles."""
    monkeypatch.setattr(kernels, "COLUMNS", 32)
    monkeypatch.setattr(kernels, "TILE", 128)
    source = torch.randn(2, 11, 97)
    index = torch.tensor([3, 3, 3, 0, 1, 3, 0, 0, 0, 2, 2]).view(1, 11, 1).expand(2, 11, 97)
    torch.testing.assert_close(index_sums(source, index, 5).double(), exact(source, index, 5), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["apart", "sorted", "pairs, then apart", "few"])
def test_many_places_take_rows_alone_or_together(kind: str) -> None:
    generator = torch.Generator().manual_seed(6)
    index = {
        "apart": torch.randperm(200, generator=generator)[:83],
        "sorted": torch.randint(0, 200, (83,), generator=generator).sort()[0],
        "pairs, then apart": torch.arange(83) // 2 + torch.arange(83).clamp(min=41) - 41,
        "few": torch.randint(7, 9, (83,), generator=generator),
    }[kind]
    index = index.view(1, 83, 1).expand(2, 83, 130)
    source = torch.randn(2, 83, 130, generator=generator)
    torch.testing.assert_close(index_sums(source, index, 200).double(), exact(source, index, 200), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("padding", "shape", "dtype"),
    in_turn(
        itertools.product([-1, 0], [(1, 1, 1), (0, 3, 5), (20, 6, 7), (9, 3, 1031)]),
        [(torch.float32, torch.bfloat16, torch.float16)],
    ),
    ids=str,
)
def test_sums_are_exact_but_for_one_rounding(shape: tuple[int, int, int], dtype: torch.dtype, padding: int) -> None:
    positions, entries, columns = shape
    assert_sums(torch.randn(positions, columns).to(dtype), torch.randint(entries, (positions,)), entries, padding)


def test_long_runs_are_summed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one to forty positions over chunks of four: within one, from end to end, over many."""
    monkeypatch.setattr(segment_kernels, "CHUNK", 4)
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
    monkeypatch.setattr(segment_kernels, "CHUNK", 4)
    indices = torch.tensor([3, 0, 3, 5] + [2] * 9 + [3] * 14)
    assert_added(torch.randn(7, 70).bfloat16(), torch.randn(len(indices), 70).bfloat16(), indices, padding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_extremes_of_rows_and_their_gradients(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Runs within a chunk of four and over many, entries without a row, rows of a table in any order."""
    monkeypatch.setattr(segment_kernels, "CHUNK", 4)
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(-9, 9, (11, 37), generator=generator).to(dtype)
    table[4, 5] = torch.nan
    indices = torch.tensor([3, 0, 3, 5] + [2] * 9 + [3] * 14 + [7] * 30)
    indices = indices[torch.randperm(len(indices), generator=generator)]
    assert_extremes(table, torch.randint(11, (len(indices),), generator=generator), indices, 9)


@pytest.mark.parametrize("columns", [7, 300])
def test_a_program_takes_several_entries_of_few_positions(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    """Entries of no, one and three positions, beside one of thirteen, a long run."""
    monkeypatch.setattr(segment_kernels, "CHUNK", 4)
    monkeypatch.setattr(segment_kernels, "PROGRAMS", 1)
    indices = torch.tensor([30, 2, 30, 5, 30, 9, 11, 12] + [17] * 13)
    for dtype in (torch.float32, torch.bfloat16):
        assert_sums(torch.randn(len(indices), columns).to(dtype), indices, 43)
        taken = torch.arange(len(indices)) % 5
        assert_extremes(torch.arange(5 * columns).view(5, columns).to(dtype) % 3, taken, indices, 43)
