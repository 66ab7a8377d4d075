"""Sums at computed places without a GPU: the formula, registration, what is launched, machine code for an H200."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.nvcc import spilled
from tests.kernels.test_recipes import BF16, INT64, build, operand, recipe_of, shapes, told
from tilewright.anatomy.simulated import simulated
from tilewright.hardware.profiles import profile_for
from tilewright.kernels.by_recipe import compiled_recipe
from tilewright.kernels.scatter_sums import cuda, scatter_sums
from tilewright.launch import nvrtc
from tilewright.records.recipe import Copy

FP32, INT32 = torch.float32, torch.int32


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An H200 that is not there, whose kernels are only asked for."""
    monkeypatch.setattr(nvrtc, "kernel", build)
    monkeypatch.setattr(nvrtc, "bindings_installed", lambda: True)
    cuda._kernel.cache_clear()
    with simulated(profile_for("h200"), "9.0"):
        yield
    cuda._kernel.cache_clear()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(7, 33), (2, 3, 5), (1, 1), (4, 0), (0, 4), (9,)], ids=str)
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


def test_an_expanded_index_is_read_once_for_four_heads(kernels: None) -> None:
    """0: source, 1: index, 2: the result. Sums of 8 warps × 4 heads × 512 elements are 64 KiB."""
    recipe = recipe_of("scatter_sums", ((96, 512, 300), BF16), ((96, 512, 300), INT64, (0, 300, 1)), 512)
    assert shapes(recipe) == [((96, 512, 512), BF16)]
    sizes = [*[("i", n) for n in (96, 512, 300, 512)], *[("q", n) for n in (153600, 300, 1, 300, 1)]]
    assert told(recipe) == [("scatter_sums", (64, 24, 1), [0, 1, 2, *sizes])]
    (launch,) = recipe.actions
    assert launch.kernel.shared_bytes == 8 * 4 * 512 * 4  # type: ignore[union-attr]


def test_a_transposed_source_is_read_where_it_lies(kernels: None) -> None:
    across = ((6, 512, 300), BF16, (153600, 1, 512))
    recipe = recipe_of("scatter_sums", across, ((6, 512, 300), INT32, (0, 300, 1)), 77)
    ((_, grid, arguments),) = told(recipe)
    assert grid == (64, 2, 1) and arguments[-5:] == [("q", n) for n in (153600, 1, 512, 300, 1)]
    (launch,) = recipe.actions
    assert launch.kernel.shared_bytes == 8 * 4 * 77 * 4 + 4 * 8 * 64 * 2  # type: ignore[union-attr]


def test_what_lies_otherwise_is_copied(kernels: None) -> None:
    # A transposed source whose rows begin at no multiple of 16 bytes; an index of which every other element counts.
    odd = recipe_of("scatter_sums", ((6, 33, 300), BF16, (9900, 1, 33)), ((6, 33, 300), INT64), 77)
    assert told(odd)[0] == (Copy(2, 0),)
    assert told(odd)[1][2][-5:] == [("q", n) for n in (0, 300, 1, 300, 1)]
    gapped = recipe_of("scatter_sums", ((6, 33), BF16), ((6, 33), INT64, (66, 2)), 77)
    assert told(gapped)[0][2][-5:] == [("q", n) for n in (0, 33, 1, 66, 2)]
    permuted = recipe_of("scatter_sums", ((2, 3, 40), FP32), ((2, 3, 40), INT64, (40, 80, 1)), 9)
    assert told(permuted)[0] == (Copy(2, 1),)


@pytest.mark.parametrize("source, extent", [(((4, 40), BF16), cuda.MOST + 1), (((4, 40), torch.float64), 9)])
def test_others_are_pytorchs(kernels: None, source: tuple[tuple[int, ...], torch.dtype], extent: int) -> None:

    operands = [operand(0, *source), operand(1, (4, 40), INT64)]
    assert compiled_recipe("tilewright::scatter_sums", operands, [*operands, extent]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("across", [False, True])
def test_no_kernel_spills(dtype: torch.dtype, across: bool) -> None:
    for group in (1, 4):
        assert spilled(cuda.SOURCE, cuda.definitions(dtype, INT64, group, across)) == {"scatter_sums": 0}
