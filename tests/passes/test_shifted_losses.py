"""Losses of all positions but the last: the numbers, and that no logits are copied."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tests.gpu.kernels.launching import in_turn
from tests.passes.graphs import aten, calls, planned, run, written
from tilewright.hardware.target import target_named
from tilewright.kernels.cross_entropy.offer import CANDIDATE
from tilewright.measure.truth.contract import compare
from tilewright.passes.simplify import drop_round_trips, drop_unread, simplify

H200 = target_named("h200")
V = 8000
Loss = Callable[[Tensor, Tensor], Any]

LOSSES: dict[str, Loss] = {
    "reshaped": lambda y, t: F.cross_entropy(y[:, :-1].reshape(-1, V).float(), t[:, 1:].reshape(-1)),
    "widened first": lambda y, t: F.cross_entropy(
        y.float()[..., :-1, :].contiguous().view(-1, V), t[:, 1:].contiguous().view(-1)
    ),
    "flattened": lambda y, t: F.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].flatten()),
    "two left out, summed": lambda y, t: F.cross_entropy(
        y[:, :-2].flatten(0, 1), t[:, 2:].clamp(min=3).flatten(), ignore_index=3, reduction="sum"
    ),
    "of rows of rows": lambda y, t: F.cross_entropy(
        y.view(2, 2, 64, V)[:, :, :-1].reshape(-1, V), t.view(2, 2, 64)[:, :, 1:].reshape(-1)
    ),
    "positions first": lambda y, t: F.cross_entropy(y.view(64, 4, V)[:-1].flatten(0, 1), t.view(64, 4)[1:].flatten()),
}


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Logits, of which not all are numbers at the last two positions, and targets."""
    generator = torch.Generator().manual_seed(5)
    targets = torch.randint(0, V, (4, 64), generator=generator)
    targets[1, 7:9] = -100
    targets[2, 30] = 3
    y = torch.randn(4, 64, V, generator=generator).to(dtype)
    y[0, -1, 5], y[1, -1, 6], y[2, -1] = torch.nan, torch.inf, -torch.inf
    return y, targets


def both(loss: Loss) -> Loss:
    """The loss and its gradient."""

    def program(y: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        y = y.detach().requires_grad_()
        value = loss(y, targets)
        return value, torch.autograd.grad(3 * value.sum(), y)[0]

    return program


def rewritten(graph: fx.Graph) -> fx.Graph:
    """With tilewright's cross entropy."""
    simplify(graph, target_named("cpu"))
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.nll_loss_forward.default):
        for offer in CANDIDATE.offers(node, H200, ()):
            if offer.refusal is None:
                offer.apply()
    drop_round_trips(graph)
    drop_unread(graph)
    return graph


@pytest.mark.parametrize(("name", "dtype"), in_turn(LOSSES, [(torch.float32, torch.bfloat16)]), ids=str)
def test_numbers_stay(name: str, dtype: torch.dtype) -> None:
    """Where logits that are left out are not finite, too: their gradient is 0."""
    program, (y, targets) = both(LOSSES[name]), drawn(dtype)
    graph = rewritten(aten(program, y, targets))
    copies = graph.find_nodes(op="call_function", target=torch.ops.aten.clone.default)
    assert not any(copy.meta["val"].is_floating_point() for copy in copies)
    assert "slice_backward.default" not in calls(graph)
    results = run(graph, y, targets), program(y, targets), program(y.double(), targets)
    for mine, eager, exact in zip(*results, strict=True):
        row = compare(mine, eager, exact)
        assert row.ok, row
    assert not results[0][1].view(-1, V)[-1].any()


class Head(torch.nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss, self.project = loss, torch.nn.Linear(64, V, dtype=torch.bfloat16)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        y = self.project(x)
        return self.loss(y, targets), y


@pytest.mark.parametrize(("name", "training"), [*((name, True) for name in LOSSES), (next(iter(LOSSES)), False)])
def test_no_logits_are_copied(name: str, training: bool) -> None:
    plan = planned(Head(LOSSES[name]), "bf16[4,64,64],int64[4,64]", training)
    assert any("tilewright.cross_entropy.default" in calls(graph.graph) for graph in plan.graphs)
    assert all(x.numel() < 63 * V for x in written(graph for graph in plan.graphs if graph.name == "forward"))


def test_what_stays() -> None:
    y, targets = drawn()
    stays: dict[str, Loss] = {
        "no slice": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
        "a later part": lambda y, t: F.cross_entropy(y[:, 1:].flatten(0, 1), t[:, 1:].flatten()),
        "half of it": lambda y, t: F.cross_entropy(y[:, :32].flatten(0, 1), t[:, :32].flatten()),
        "losses of rows": lambda y, t: F.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].flatten(), reduction="none"),
        "weights": lambda y, t: F.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].flatten(), y[0, 0].detach().abs()),
        "other classes": lambda y, t: F.cross_entropy(y[:, :, :-1].flatten(0, 1), t.clamp(0, 9).flatten()),
        "strided": lambda y, t: F.cross_entropy(y.transpose(0, 1)[:-1].flatten(0, 1), t.T[1:].flatten()),
        "read twice": lambda y, t: F.cross_entropy(x := y[:, :-1].flatten(0, 1), t[:, 1:].flatten()) + x.sum(),
    }
    for loss in stays.values():
        assert "constant_pad_nd.default" not in calls(rewritten(aten(both(loss), y, targets)))
