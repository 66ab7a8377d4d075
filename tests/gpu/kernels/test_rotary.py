"""The rotary embedding on a GPU: the numbers contract in every layout, and how it is launched."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.gpu.kernels.launching import compiled, on_a_side_stream, replayed, values_of
from tilewright.bench.catalogue import suite
from tilewright.kernels.rotary import rotary
from tilewright.measure.truth.proof import prove

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
SIZES = [
    (1, 1, 1, 1, 2),
    (2, 5, 3, 1, 12),
    (1, 300, 32, 8, 128),
    (2, 33, 40, 5, 64),
    (1, 7, 2, 2, 250),
    (0, 3, 2, 2, 8),
]


def drawn(sizes: tuple[int, ...], dtype: str = "float32") -> tuple[torch.Tensor, ...]:
    generator = torch.Generator(GPU).manual_seed(0)
    inputs: tuple[torch.Tensor, ...] = suite("rotary").workload(sizes, dtype).make(GPU, generator)
    return inputs


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_the_numbers_contract(sizes: tuple[int, ...], dtype: str, interleaved: bool) -> None:
    q, k, *angles = drawn(sizes, dtype)
    batch, heads, length, width = q.shape
    misaligned = torch.zeros(q.numel() + 1, device=GPU, dtype=q.dtype)[1:].view(q.shape)
    wide = torch.zeros(batch, heads, length, 2 * width + 1, device=GPU, dtype=q.dtype)[..., 1 : width + 1]
    for way in (q.detach(), q.detach().contiguous(), misaligned.copy_(q.detach()), wide.copy_(q.detach())):
        inputs = (way.requires_grad_(), k, *angles, interleaved)
        rows = prove(suite("rotary"), lambda *given: rotary(*given[:4], interleaved=given[4]), inputs)
        assert [row for row in rows if not row.ok] == []


@pytest.mark.parametrize("interleaved", [False, True])
def test_streams_graphs_and_compilation(interleaved: bool) -> None:
    call = functools.partial(rotary, interleaved=interleaved)
    inputs = drawn((2, 33, 8, 2, 64))
    plain = values_of(call, inputs)
    for way in (on_a_side_stream, replayed, compiled):
        assert all(torch.equal(mine, true) for mine, true in zip(way(call, inputs), plain, strict=True))


def test_more_elements_than_31_bits_count() -> None:
    q = torch.zeros(2, 2**17 + 1, 64, 128, device=GPU, dtype=torch.bfloat16).transpose(1, 2)
    q[-1, -1, -1, 0] = 2.0
    angle = torch.full((2**17 + 1, 64), torch.pi / 2, device=GPU)
    turned, _ = rotary(q, q[:, :1], angle.cos(), angle.sin())
    assert turned[-1, -1, -1, 64].item() == 2.0
    assert (turned.abs() > 1).sum().item() == 1
