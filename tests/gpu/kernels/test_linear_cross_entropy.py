"""Linear and cross entropy on a GPU: the contract, memory, launches."""

import pytest
import torch

from tests.contract import broken
from tests.gpu.kernels.launching import compiled, on_a_side_stream, replayed, values_of
from tests.kernels.vocabulary import OPTIONS, SUITE, Options, by_position, inputs, of_all_logits
from tilewright.kernels.linear_cross_entropy import linear_cross_entropy
from tilewright.measure.truth.contract import compare
from tilewright.operators.own import linear_cross_entropy as row

pytestmark = pytest.mark.gpu
SHAPES = [(1, 1, 1), (131, 37, 101), (23, 64, 50257), (512, 256, 32768)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_the_contract_is_kept(
    sizes: tuple[int, int, int], options: Options, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row, "LOGITS_BYTES", 48 * sizes[2] * dtype.itemsize)
    given = (*inputs(*sizes, dtype, "cuda"), *options)
    wrong = broken(SUITE, given, by_position)
    if dtype == torch.float16 and of_all_logits(*given).isinf():
        # Smoothing adds up every log-probability, in PyTorch in fp16 and past its range; in fp32 it is finite.
        assert [(row.direction, row.error) for row in wrong] == [("fwd", 0.0)]
        true = of_all_logits(given[0].double(), given[1].double(), *given[2:])
        torch.testing.assert_close(by_position(*given).double(), true, rtol=4 * 2**-10, atol=0)
    else:
        assert wrong == []


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
    assert beyond <= row.LOGITS_BYTES + 2**20


def test_logits_beyond_32_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(row, "LOGITS_BYTES", 2**34)
    x, weight, target = inputs(2**31 // 131072 + 64, 8, 131072, torch.bfloat16, "cuda")
    found = torch.autograd.grad(linear_cross_entropy(x, weight, target), (x, weight))
    eager = torch.autograd.grad(of_all_logits(x, weight, target), (x, weight))
    true = _gradients_by_parts(x.detach().double(), weight.detach().double(), target)
    for tensors in zip(found, eager, true, strict=True):
        assert compare(*tensors, direction="bwd").ok


def _gradients_by_parts(
    x: torch.Tensor, weight: torch.Tensor, target: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of the mean loss in float64, a few rows of logits at a time."""
    weight.requires_grad_()
    parts = []
    total = torch.zeros_like(weight)
    for some, labels in zip(x.split(2048), target.split(2048), strict=True):
        loss = of_all_logits(some.requires_grad_(), weight, labels, reduction="sum") / len(x)
        of_some, of_weight = torch.autograd.grad(loss, (some, weight))
        parts.append(of_some)
        total += of_weight
    return torch.cat(parts), total
