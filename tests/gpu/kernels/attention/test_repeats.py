"""Attention on a GPU: the same bits in a thousand backwards where that was asked for, and memory that grows as S."""

from __future__ import annotations

import pytest
import torch

from tilewright.functional import attention

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda:0")
REPEATS = 1000
MIB = 2**20


def drawn(*shape: int) -> list[torch.Tensor]:
    generator = torch.Generator(GPU).manual_seed(0)
    return [torch.randn(shape, generator=generator, device=GPU).bfloat16().requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("width", [64, 256])
def test_a_thousand_deterministic_backwards(width: int) -> None:
    q, k, v = drawn(2, 4, 511, width)
    out = attention(q, k, v, causal=True, deterministic=True)
    dout = torch.randn_like(out)
    first = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
    differing = torch.zeros(3, dtype=torch.int64, device=GPU)
    for _ in range(REPEATS):
        again = torch.autograd.grad(out, (q, k, v), dout, retain_graph=True)
        differing += torch.stack([(x != y).sum() for x, y in zip(again, first, strict=True)])
    assert all(x.isfinite().all() for x in first)
    assert differing.tolist() == [0, 0, 0]


def test_memory_is_linear_in_the_length() -> None:
    """Forward and backward, beside the inputs: from 1,024 positions to 131,072 it doubles as they do."""
    peaks = []
    for length in (1024 * 2**i for i in range(8)):
        q, k, v = drawn(1, 2, length, 128)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = attention(q, k, v, causal=True)
        torch.autograd.grad(out, (q, k, v), out.detach())
        peaks.append((torch.cuda.max_memory_allocated() - before) / length)
        del q, k, v, out
    # What a position takes: the result, four gradients in 16 bits, sums of dQ in fp32, and three numbers a head.
    assert max(peaks) <= 2 * (5 * 128 * 2 + 128 * 4 + 3 * 4) + MIB / 1024
    assert max(peaks[3:]) <= 1.05 * peaks[-1]
