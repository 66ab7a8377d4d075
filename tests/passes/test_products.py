"""Products of matrices that are added up in place; other rewrites of products are rows of `rewrites.txt`."""

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


def broadcast(x: Tensor, w: Tensor, row: Tensor) -> Tensor:
    """In backward the gradients of the weight are added up."""
    return x @ w + row @ w


def of_two_dtypes(x: Tensor, w: Tensor) -> Tensor:
    return x @ w + x.bfloat16() @ w.bfloat16()


@pytest.mark.parametrize(
    ("program", "shapes", "added"),
    [
        (shared, [(16, 24), (24, 24)], 3),
        (recurrent, [(8, 5, 12), (20, 20), (12, 20)], 3 + 4),
        (scaled, [(16, 24), (24, 24)], 0),
        (broadcast, [(16, 24), (24, 24), (1, 24)], 1),
        (of_two_dtypes, [(16, 24), (24, 24)], 0),
    ],
    ids=["shared", "recurrent", "scaled", "broadcast", "of two dtypes"],
)
def test_products_are_added_in_place_where_the_sum_is_a_result(
    program: Callable[..., Tensor], shapes: list[tuple[int, ...]], added: int
) -> None:
    record = keeps_contract(program, [torch.randn(shape, requires_grad=True) for shape in shapes])
    plans = [graph.plan for graph in record.graphs]
    in_place = [node for plan in plans for node in plan.graph.nodes if node.target is torch.ops.aten.addmm_.default]
    decisions = [decision for plan in plans for decision in plan.fusion.decisions if decision.passed_by == "products"]
    assert len(in_place) == len(decisions) == added
