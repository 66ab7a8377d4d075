"""Losses of all positions but the last: the numbers, and that no logits are copied."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.graphs import aten, calls, run
from tilewright.compile.capture import capture
from tilewright.compile.planner import Planner
from tilewright.hardware.target import target_named
from tilewright.passes.shifted_losses import read_all_positions
from tilewright.passes.simplify import simplify
from tilewright.records.case import Case, InputSpec

H200 = target_named("h200")
V = 1000
Loss = Callable[[Tensor, Tensor], Tensor]

LOSSES: dict[str, Loss] = {
    "reshaped": lambda y, t: F.cross_entropy(y[:, :-1].reshape(-1, V).float(), t[:, 1:].reshape(-1)),
    "widened first": lambda y, t: F.cross_entropy(
        y.float()[..., :-1, :].contiguous().view(-1, V), t[:, 1:].contiguous().view(-1)
    ),
    "flattened": lambda y, t: F.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].flatten()),
    "two left out, summed": lambda y, t: F.cross_entropy(
        y[:, :-2].flatten(0, 1), t[:, 2:].flatten(), ignore_index=3, reduction="sum"
    ),
    "of rows of rows": lambda y, t: F.cross_entropy(
        y.view(2, 2, 64, V)[:, :, :-1].reshape(-1, V), t.view(2, 2, 64)[:, :, 1:].reshape(-1)
    ),
}


def drawn(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    targets = torch.randint(0, V, (4, 64), generator=generator)
    targets[1, 7:9] = -100
    targets[2, 30] = 3
    return torch.randn(4, 64, V, generator=generator).to(dtype), targets


@pytest.mark.parametrize("name", LOSSES)
def test_numbers_stay(name: str) -> None:
    """Of the loss and, in a joint graph, of its gradient."""
    loss, (y, targets) = LOSSES[name], drawn()
    targets = targets.clamp(min=0) if "ignore" in name or "summed" in name else targets

    def both(y: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        y = y.detach().requires_grad_()
        value = loss(y, targets)
        return value, torch.autograd.grad(value * 3, y)[0]

    graph = aten(both, y, targets)
    simplify(graph)
    read_all_positions(graph, H200)
    assert not {"slice_backward.default", "clone.default"} & set(
        calls(graph)[calls(graph).index("_log_softmax.default") :]
    )
    for found, exact in zip(run(graph, y, targets), both(y.double(), targets), strict=True):
        torch.testing.assert_close(found.double(), exact.double(), rtol=1e-5, atol=1e-6)


class Head(torch.nn.Module):
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.loss, self.project = loss, torch.nn.Linear(64, V, dtype=torch.bfloat16)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        y = self.project(x)
        return self.loss(y, targets), y


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_no_logits_are_copied(name: str, training: bool) -> None:
    inputs = [InputSpec("bfloat16", (4, 64, 64), (None,) * 3), InputSpec("int64", (4, 64), (None,) * 2)]
    plan = capture(Case(name, lambda: Head(LOSSES[name]), inputs, training=training), Planner(H200)).plan
    assert any("tilewright.cross_entropy.default" in calls(graph.graph) for graph in plan.graphs)
    forward = next(graph for graph in plan.graphs if graph.name == "forward")
    outputs = [o for region in forward.fusion.regions for o in region.lowered.outputs]
    assert max((output.meta["val"].numel() for output in outputs), default=0) < 63 * V


def test_what_stays() -> None:
    y, targets = drawn()
    stays: dict[str, Loss] = {
        "no slice": lambda y, t: F.cross_entropy(y.flatten(0, 1), t.flatten()),
        "a later part": lambda y, t: F.cross_entropy(y[:, 1:].flatten(0, 1), t[:, 1:].flatten()),
        "half of it": lambda y, t: F.cross_entropy(y[:, :32].flatten(0, 1), t[:, :32].flatten()),
        "losses of rows": lambda y, t: F.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].flatten(), reduction="none"),
        "weights": lambda y, t: F.cross_entropy(y[:, :-1].flatten(0, 1), t[:, 1:].flatten(), y[0, 0].abs()),
        "other classes": lambda y, t: F.cross_entropy(y[:, :, :-1].flatten(0, 1), t.clamp(0, 9).flatten()),
        "strided": lambda y, t: F.cross_entropy(y.transpose(0, 1)[:-1].flatten(0, 1), t.T[1:].flatten()),
        "read twice": lambda y, t: F.cross_entropy(x := y[:, :-1].flatten(0, 1), t[:, 1:].flatten()) + x.sum(),
    }
    for function in stays.values():
        graph = aten(function, y, targets)
        before = calls(graph)
        read_all_positions(graph, H200)
        assert calls(graph) == before
    graph = aten(LOSSES["flattened"], y, targets)
    before = calls(graph)
    read_all_positions(graph, target_named("cpu"))
    assert calls(graph) == before
