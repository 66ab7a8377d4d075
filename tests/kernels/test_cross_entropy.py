"""Cross entropy without a GPU, beside `test_rows.py`: options, targets, and rows that do not count."""

from typing import Any

import pytest
import torch

from tests.kernels.losses import OPTIONS, wrong_losses
from tests.kernels.row_operators import layout
from tilewright.bench.suites.cross_entropy import SUITES
from tilewright.kernels.cross_entropy import by_impl, cross_entropy

CPU = torch.device("cpu")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options(options: dict[str, Any]) -> None:
    assert wrong_losses(layout("7x33", torch.float32, CPU), options, "auto") == []


def test_z_loss_remains_where_one_class_has_all() -> None:
    logits = 30 * torch.eye(3)[:1]
    single = torch.randn(4, 1, dtype=torch.float32)
    for z_loss, smoothing, given in ((1e-4, 0.0, logits), (1e-4, 0.7, single)):
        ours, true = (
            torch.autograd.grad(
                cross_entropy(x, torch.zeros(len(x), dtype=torch.long), z_loss=z_loss, label_smoothing=smoothing), x
            )[0].double()
            for x in (given.clone().requires_grad_(), given.double().requires_grad_())
        )
        torch.testing.assert_close(ours, true, rtol=1e-6, atol=0)


def test_targets_of_any_integer_dtype() -> None:
    logits = torch.randn(4, 100)
    target = torch.tensor([0, 99, 5, 7])
    wanted = cross_entropy(logits, target)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        assert torch.equal(cross_entropy(logits, target.to(dtype)), wanted)


def test_nothing_counted() -> None:
    logits = torch.randn(3, 5, requires_grad=True)
    target = torch.full((3,), -100)
    assert cross_entropy(logits, target).isnan()
    assert cross_entropy(logits, target, reduction="sum") == 0
    (gradient,) = torch.autograd.grad(cross_entropy(logits, target, reduction="sum"), logits)
    assert gradient.eq(0).all()


def test_an_unknown_way_is_said() -> None:
    with pytest.raises(ValueError, match="auto, torch, triton, cuda, not 'metal'"):
        by_impl(torch.randn(3, 5), torch.tensor([0, 1, 2]), impl="metal")


def test_a_class_that_is_none_is_an_index_error() -> None:
    with pytest.raises(IndexError):
        cross_entropy(torch.randn(3, 5), torch.full((3,), 5))


def test_the_suite_counts_its_bytes() -> None:
    suite = SUITES["cross_entropy"]
    workload = suite.workload((6, 9), "bfloat16")
    logits, target = workload.make(CPU, torch.Generator())
    assert workload.name == "6x9 bf16"
    assert workload.work["fwd"].nbytes == logits.nbytes + target.nbytes
    assert workload.work["bwd"].nbytes == 2 * logits.nbytes + target.nbytes
    losses = [suite.variant(name).function(logits, target) for name in ("tilewright", "torch", "eager")]
    torch.testing.assert_close(losses[0], losses[1])
    torch.testing.assert_close(losses[0], losses[2], rtol=0.02, atol=0.02)
