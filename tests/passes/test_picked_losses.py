"""Cross entropy on a CPU from two numbers a row: the numbers, what is kept, what stays a call."""

import itertools
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.backend.compiling import compiled
from tests.contract import keeps_contract, launched
from tests.gpu.kernels.launching import in_turn
from tests.passes.graphs import aten, calls, planned, run, written
from tests.passes.losses import CLASSES, LOSSES, Head, inputs
from tilewright.backend import recording
from tilewright.graph.insert import replace
from tilewright.hardware.target import target_named
from tilewright.measure.truth.contract import compare
from tilewright.passes.loss import split_losses


@pytest.mark.parametrize(
    ("loss", "scale"), [*((loss, 1.0) for loss in LOSSES), *((loss, 300.0) for loss in LOSSES[::2])]
)
def test_losses_and_gradients(loss: Callable[..., Tensor], scale: float) -> None:
    target = inputs(torch.float32)[1]
    logits = scale * torch.randn(2, 9, CLASSES, generator=torch.Generator().manual_seed(1))
    assert set(launched(keeps_contract(loss, [logits.requires_grad_(), target]))) == {"kernel"}


@pytest.mark.parametrize("classes", [1, 17, 2000])
def test_rows_that_are_all_ignored_or_hold_infinities(classes: int) -> None:
    logits = torch.randn(5, classes, generator=torch.Generator().manual_seed(1))
    logits[1, 0] = -torch.inf
    logits[2, -1] = torch.inf
    logits[3, 0] = torch.nan
    for target in (torch.full((5,), -100), torch.tensor([0, classes - 1, 0, 0, -100])):
        x, y = (logits.clone().requires_grad_() for _ in range(2))
        mine, eager = compiled(F.cross_entropy)(x, target), F.cross_entropy(y, target)
        mine.backward()
        eager.backward()
        torch.testing.assert_close(mine, eager, equal_nan=True)
        torch.testing.assert_close(x.grad, y.grad, equal_nan=True)


def test_no_row_of_classes_is_kept_for_backward_beside_the_logits() -> None:
    head, (x, target) = Head(LOSSES[0], torch.float32), inputs(torch.float32)
    with recording() as record:
        compiled(head)(x, target)
    forward = next(graph for graph in record.graphs if graph.plan.name == "forward")
    kept = [node.meta["val"] for node in forward.plan.graph.output_node().all_input_nodes]
    assert sum(value.numel() >= 2 * 9 * CLASSES for value in kept) == 1


@pytest.mark.parametrize(
    ("reduction", "places", "dtype"),
    in_turn(
        itertools.product(["mean", "sum", "none"], [(3, 5), (15,), (3, 1, 5)]),
        [(torch.float32, torch.bfloat16, torch.float64)],
    ),
    ids=str,
)
def test_classes_of_places_for_a_gpu(reduction: str, places: tuple[int, ...], dtype: torch.dtype) -> None:
    def program(x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        loss = F.cross_entropy(x, target, reduction=reduction, ignore_index=2)
        (gradient,) = torch.autograd.grad(loss.sum(), x)
        return loss.detach(), gradient

    generator = torch.Generator().manual_seed(1)
    x, target = (
        torch.randn(2, 7, *places, generator=generator).to(dtype),
        torch.randint(7, (2, *places), generator=generator),
    )
    graph = aten(program, x, target)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        replace(node, node.args[0])
    split_losses(graph, target_named("h200"))
    assert not any("nll_loss" in call or "softmax" in call for call in calls(graph))
    for name, mine, theirs, exact in zip(
        ("loss", "gradient"), run(graph, x, target), program(x, target), program(x.double(), target), strict=True
    ):
        assert mine.dtype == theirs.dtype and mine.stride() == theirs.stride()
        row = compare(mine, theirs, exact, tensor=name)
        assert row.ok, row


def lies_last(x: Tensor) -> Tensor:
    return x.movedim(1, -1).contiguous().movedim(-1, 1)


@pytest.mark.parametrize(
    ("laid", "places", "trains"),
    in_turn(itertools.product([lies_last, lambda x: x[..., 1:]], [(3, 5), (15,), (3, 2, 5)]), [(True, False)]),
)
def test_logits_with_strides_of_their_own_for_a_gpu(
    trains: bool, places: tuple[int, ...], laid: Callable[[Tensor], Tensor]
) -> None:
    """A part of a volume is the only one that cannot be viewed as an image."""

    def program(x: Tensor, target: Tensor) -> tuple[Tensor, ...]:
        x = laid(x.detach()).requires_grad_(trains)
        loss = F.cross_entropy(x, target)
        return (loss.detach(), *(g.reshape(len(g), -1).sin() for g in (torch.autograd.grad(loss, x) if trains else ())))

    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 7, *places, generator=generator)
    target = torch.randint(7, laid(x)[:, 0].shape, generator=generator)
    graph = aten(program, x, target)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.detach.default):
        replace(node, node.args[0])
    split_losses(graph, target_named("h200"))
    stays = len(places) == 3 and laid is not lies_last
    assert any("nll_loss" in call or "softmax" in call for call in calls(graph)) == stays
    for mine, theirs in zip(run(graph, x, target), program(x, target), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_a_target_outside_is_an_error() -> None:
    run = compiled(F.cross_entropy)
    with pytest.raises(IndexError, match="out of bounds for a dimension of size 7"):
        run(torch.randn(3, 7), torch.tensor([0, 7, 2]))


def test_weighted_classes_and_a_log_softmax_that_is_read_stay_calls() -> None:
    target, weight = torch.tensor([0, 4, 2, 6]), torch.rand(7, generator=torch.Generator().manual_seed(0))
    x = torch.randn(4, 7, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for loss in (
        lambda x, t, w: F.cross_entropy(x, t, weight=w.to(x.dtype)),
        lambda x, t, w: F.nll_loss(y := x.log_softmax(1), t) + y.sum(),
    ):
        assert any("nll_loss" in what for what in launched(keeps_contract(loss, [x, target, weight])))


def pairs(x: Tensor, y: Tensor) -> Tensor:
    """Each row's own column is the right one, and each column's own row."""
    scores, own = x @ y.T, torch.arange(len(x), device=x.device)
    return F.cross_entropy(scores.float(), own) + F.cross_entropy(scores.T.float(), own)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_of_rows_and_of_columns_have_one_gradient(dtype: str) -> None:
    """On a GPU neither takes the kernel for rows, which would need them copied."""
    plan = planned(Pairs().to(getattr(torch, dtype)), f"{dtype}[4096,64],{dtype}[4096,64]")
    assert not any(
        "cross_entropy" in call or "nll_loss" in call for graph in plan.graphs for call in calls(graph.graph)
    )
    assert sum(x.numel() == 4096 * 4096 for x in written(plan.graphs)) == 1


class Pairs(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(64, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return pairs(self.project(x), y)


@pytest.mark.parametrize("scale", [1.0, 300.0])
def test_numbers_of_losses_across(scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    x, y = (scale**0.5 * torch.randn(50, 8, generator=generator) for _ in "xy")
    graph = aten(pairs, x, y)
    split_losses(graph, target_named("h200"))
    assert not any("nll_loss" in call for call in calls(graph))
    torch.testing.assert_close(run(graph, x, y).double(), pairs_in_double(x, y), rtol=1e-5, atol=1e-5)


def pairs_in_double(x: Tensor, y: Tensor) -> Tensor:
    scores = x.double() @ y.double().T
    rows, columns = (torch.logsumexp(scores, dim).mean() - scores.diagonal().mean() for dim in (0, 1))
    return rows + columns
