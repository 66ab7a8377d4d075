"""The embedding's Triton kernels in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.interpreter import install
from tilewright.bench.suites.embedding import SUITES
from tilewright.kernels.embedding import embedding
from tilewright.kernels.embedding import triton as kernels
from tilewright.measure.truth.proof import prove

install()
SUITE = SUITES["embedding"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(1, 1, 1), (0, 3, 5), (20, 6, 7), (9, 3, 1031)], ids=str)
@pytest.mark.parametrize("padding", [None, 0, -1])
def test_the_contract_is_kept(shape: tuple[int, int, int], dtype: torch.dtype, padding: int | None) -> None:
    tokens, entries, columns = shape
    generator = torch.Generator().manual_seed(0)
    indices = torch.randint(entries, (tokens,), generator=generator)
    weight = torch.randn(entries, columns, generator=generator).to(dtype).requires_grad_()
    rows = prove(SUITE, embedding, (indices, weight, padding))
    assert [row for row in rows if not row.ok] == []


def test_long_runs_are_summed_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs of one to forty positions over chunks of four: within one, from end to end, over many."""
    monkeypatch.setattr(kernels, "CHUNK", 4)
    for lengths in ((1, 8, 9, 3, 40), (9, 9, 9), (40,), (2, 11, 2, 12), (7, 8, 0, 25, 1)):
        indices = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        indices = indices[torch.randperm(len(indices), generator=torch.Generator().manual_seed(0))]
        for padding in (None, 0, 3 % len(lengths)):
            inputs = indices, torch.randn(len(lengths), 6).requires_grad_(), padding
            assert all(row.ok for row in prove(SUITE, embedding, inputs)), lengths


def test_any_shape_and_type_of_indices() -> None:
    indices = torch.tensor([[3, 0, 3], [1, 1, 2]], dtype=torch.int32).t()
    weight = torch.randn(4, 6)[:, :5].requires_grad_()
    out = embedding(indices, weight)
    assert torch.equal(out, weight[indices.long()])
    (found,) = torch.autograd.grad(out.sum(), weight)
    assert torch.equal(found, torch.bincount(indices.flatten().long(), minlength=4).float()[:, None].expand(4, 5))


@pytest.mark.parametrize("padding", [-1, 2])
def test_sums_are_added_in_place(monkeypatch: pytest.MonkeyPatch, padding: int) -> None:
    """Rows that nobody asked for keep their bits; the others are rounded once."""
    monkeypatch.setattr(kernels, "CHUNK", 4)
    indices = torch.tensor([3, 0, 3, 5] + [2] * 9 + [3] * 14, dtype=torch.int32)
    dout, table = torch.randn(len(indices), 70).bfloat16(), torch.randn(7, 70).bfloat16()
    keys, order = indices.sort(stable=True)
    exact = table.double().index_add(0, indices, torch.where(indices == padding, 0, dout.double().mT).mT)
    before = table.clone()
    torch.ops.tilewright.add_embedding_sums_(table, dout, keys, order, padding)
    untouched = [row for row in range(7) if row not in indices or row == padding]
    assert torch.equal(table[untouched], before[untouched])
    torch.testing.assert_close(table.double(), exact, rtol=2**-8, atol=1e-5)
