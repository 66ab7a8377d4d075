"""The embedding on a GPU: the numbers contract, the same gradient at every run, and how it is launched."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.gpu.kernels.launching import compiled, on_a_side_stream, replayed, values_of
from tilewright.bench.catalogue import suite
from tilewright.kernels.embedding import embedding
from tilewright.measure.truth.proof import prove

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
SIZES = [(0, 3, 5), (1, 1, 1), (1000, 11, 7), (4099, 257, 1031), (20000, 3, 1024), (3000, 50257, 256)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("padding", [None, 0, -1])
def test_the_numbers_contract(sizes: tuple[int, ...], dtype: str, padding: int | None) -> None:
    inputs = suite("embedding").workload(sizes, dtype).make(GPU, torch.Generator(GPU).manual_seed(0))
    rows = prove(suite("embedding"), embedding, (*inputs, padding))
    assert [row for row in rows if not row.ok] == []


def test_streams_graphs_and_compilation() -> None:
    """Equal to the bit, so the order of the sums is always the same."""
    indices = torch.randint(50, (4, 3000), device=GPU, dtype=torch.int32)
    inputs = indices, torch.randn(50, 300, device=GPU, requires_grad=True)
    plain = values_of(embedding, inputs)
    for way in (on_a_side_stream, replayed, compiled, values_of):
        other = way(embedding, inputs)
        assert all(torch.equal(mine, true) for mine, true in zip(other, plain, strict=True))


def test_rows_and_misaligned_storage() -> None:
    indices = torch.randint(50, (3000,), device=GPU)
    drawn = torch.randn(50, 603, device=GPU).bfloat16()
    for weight in (drawn[:, 1:302], drawn.flatten()[1:15001].view(50, 300), drawn[:, ::2], drawn[:, :300].t()):
        rows = weight.shape[0]
        inputs = indices % rows, weight.detach().requires_grad_()
        assert all(row.ok for row in prove(suite("embedding"), embedding, inputs))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_added_in_place(dtype: torch.dtype) -> None:
    """Rows that nobody asked for keep their bits; the others are rounded once."""
    indices = torch.randint(5000, (9000,), device=GPU).clamp(max=3000).int()
    dout, table = torch.randn(9000, 600, device=GPU).to(dtype), torch.randn(5003, 600, device=GPU).to(dtype)
    keys, order = indices.sort(stable=True)
    exact = table.double().index_add(0, indices, dout.double())
    terms = table.double().abs().index_add(0, indices, dout.double().abs())
    before = table.clone()
    torch.ops.tilewright.add_embedding_sums_(table, dout, keys, order, -1)
    asked = torch.bincount(indices, minlength=5003) > 0
    assert torch.equal(table[~asked], before[~asked]) and asked.any() and not asked.all()
    allowed = terms * 2**-20 + exact.abs() * torch.finfo(dtype).eps / 2
    assert ((table.double() - exact).abs() <= allowed).all()


def test_an_index_outside_of_the_table_stops_the_device() -> None:
    """In a process of its own: the assertion ends what the process can do with the device."""
    program = (
        "import torch; from tilewright.kernels.embedding import embedding; "
        "embedding(torch.tensor([0, 5], device='cuda'), torch.randn(5, 8, device='cuda')); torch.cuda.synchronize()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=os.environ.copy())
    assert done.returncode != 0
    assert "index out of range of the embedding" in done.stdout + done.stderr


def test_more_elements_than_31_bits_count() -> None:
    weight = torch.zeros(2**17 + 1, 2**14, device=GPU, dtype=torch.bfloat16)
    weight[-1, -1] = 2.0
    indices = torch.tensor([2**17, 0], device=GPU)
    out = embedding(indices, weight.requires_grad_())
    assert torch.equal(out, weight[indices])
    (gradient,) = torch.autograd.grad(out, weight, torch.ones_like(out))
    assert gradient[-1].eq(1).all() and gradient[0].eq(1).all()
    assert not gradient[1:-1].any()
