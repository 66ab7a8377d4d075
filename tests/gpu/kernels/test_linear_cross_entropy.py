"""Linear and cross entropy on a GPU: the contract, memory, launches."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.kernels.launching import compiled, on_a_side_stream, replayed, values_of
from tests.kernels.vocabulary import OPTIONS, Options, by_position, inputs
from tilewright.kernels.catalogue import suite
from tilewright.kernels.linear_cross_entropy import chunks, linear_cross_entropy
from tilewright.measure.proof import prove

pytestmark = pytest.mark.gpu
SHAPES = [(1, 1, 1), (131, 37, 101), (23, 64, 50257), (512, 256, 32768)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_the_contract_is_kept(
    sizes: tuple[int, int, int], options: Options, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunks, "LOGITS_BYTES", 48 * sizes[2] * dtype.itemsize)
    rows = prove(suite("linear_cross_entropy"), by_position, (*inputs(*sizes, dtype, "cuda"), *options))
    assert [row for row in rows if not row.ok] == []


def test_launched_in_every_way() -> None:
    given = inputs(300, 64, 5000, torch.bfloat16, "cuda")
    plain = values_of(linear_cross_entropy, given)
    for way in (on_a_side_stream, replayed, compiled):
        for found, expected in zip(way(linear_cross_entropy, given), plain, strict=True):
            torch.testing.assert_close(found, expected)


def test_memory_beyond_inputs_and_gradients() -> None:
    """At most a chunk of logits, in forward and in backward."""
    x, weight, target = inputs(4096, 256, 131072, torch.bfloat16, "cuda")
    torch.autograd.grad(linear_cross_entropy(x, weight, target), (x, weight))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    gradients = torch.autograd.grad(3 * linear_cross_entropy(x, weight, target), (x, weight))
    beyond = torch.cuda.max_memory_allocated() - before - sum(gradient.nbytes for gradient in gradients)
    assert beyond <= chunks.LOGITS_BYTES + 2**20


def test_logits_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "LOGITS_BYTES", 2**34)
    x, weight, target = inputs(2**31 // 131072 + 64, 8, 131072, torch.bfloat16, "cuda")
    loss = linear_cross_entropy(x, weight, target)
    found = torch.autograd.grad(loss, (x, weight))
    monkeypatch.setattr(chunks, "LOGITS_BYTES", 2**30)
    expected = torch.autograd.grad(linear_cross_entropy(x, weight, target), (x, weight))
    torch.testing.assert_close(found[0], expected[0])
    torch.testing.assert_close(found[1], expected[1], rtol=2e-2, atol=1e-6)
