"""Gradients of weights that are used several times: their products are added up in place."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.contract import keeps_contract


def shared(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(4):
        x = torch.tanh(x @ w)
    return x


def recurrent(x: Tensor, w: Tensor, u: Tensor) -> Tensor:
    h = x[:, 0] @ u
    for step in range(1, x.shape[1]):
        h = torch.tanh(h @ w + x[:, step] @ u)
    return h


def scaled(x: Tensor, w: Tensor) -> Tensor:
    """The sum of the products is read in the graph: it stays part of the kernel that scales it."""
    v = w * 2
    return torch.tanh(x @ v) @ v


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape))).requires_grad_()


@pytest.mark.parametrize(
    ("program", "inputs", "added"),
    [
        (shared, (random(16, 24), random(24, 24)), 3),
        (recurrent, (random(8, 5, 12), random(20, 20), random(12, 20)), 3 + 4),
        (scaled, (random(16, 24), random(24, 24)), 0),
    ],
    ids=["shared", "recurrent", "scaled"],
)
def test_products_are_added_in_place_where_the_sum_is_a_result(
    program: Callable[..., Tensor], inputs: tuple[Tensor, ...], added: int
) -> None:
    record = keeps_contract(program, list(inputs))
    plans = [graph.plan for graph in record.graphs]
    in_place = [node for plan in plans for node in plan.graph.nodes if node.target is torch.ops.aten.addmm_.default]
    decisions = [decision for plan in plans for decision in plan.fusion.decisions if decision.passed_by == "products"]
    assert len(in_place) == len(decisions) == added
