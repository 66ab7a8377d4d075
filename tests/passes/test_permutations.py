"""Gradients of gathers by a permutation: which become gathers, and their numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import aten, calls, run
from tilewright.passes.permutations import gather_back

Function = Callable[[Tensor, Tensor], Tensor]


def by_order(x: Tensor, keys: Tensor) -> Tensor:
    return x[keys.sort()[1]] * torch.arange(len(keys)).sin()[:, None]


def there_and_back(x: Tensor, keys: Tensor) -> Tensor:
    """Each row to three places, in the order of `keys`, and the three together again."""
    order = keys.argsort()
    back = torch.empty_like(order).index_put((order,), torch.arange(len(order)))
    sent = x[order // 3] * torch.arange(len(keys)).sin()[:, None]
    return sent[back].view(len(x), 3, -1).sum(1)


def gradient(function: Function) -> Function:
    def call(x: Tensor, keys: Tensor) -> Tensor:
        (dx,) = torch.autograd.grad(function(x.requires_grad_(), keys).square().sum(), x)
        return dx

    return call


def inputs(rows: int, keys: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    return torch.randn(rows, 5, generator=draw, dtype=torch.float64), torch.randint(0, 4, (keys,), generator=draw)


@pytest.mark.parametrize(("function", "rows", "keys"), [(by_order, 12, 12), (there_and_back, 7, 21)])
def test_a_gradient_by_a_permutation_adds_nothing_up(function: Function, rows: int, keys: int) -> None:
    given = inputs(rows, keys)
    graph = aten(gradient(function), *given)
    before = calls(graph)
    decisions = gather_back(graph)
    assert [decision.verdict for decision in decisions] == ["taken"] * (1 if function is by_order else 2)
    # One scatter is left in each: the inverse.
    assert before.count("index_put.default") == len(decisions) + (function is there_and_back)
    assert calls(graph).count("index_put.default") == 1
    torch.testing.assert_close(run(graph, *given), gradient(function)(*given), rtol=1e-14, atol=1e-14)


def by_part_of_a_permutation(x: Tensor, keys: Tensor) -> Tensor:
    order = keys.sort()[1]
    return x[torch.zeros_like(order).index_put((order[:5],), torch.arange(5))]


OTHERS: dict[str, tuple[Function, int, int]] = {
    "of fewer": (lambda x, keys: x[keys.sort()[1][:5]], 12, 12),
    "of more rows": (lambda x, keys: x[keys.sort()[1]], 13, 12),
    "by values": (lambda x, keys: x[keys.sort()[0]], 12, 12),
    "of columns": (lambda x, keys: x[:, keys.sort()[1]], 12, 5),
    "to uneven places": (lambda x, keys: x[keys.sort()[1] // 2], 7, 13),
    "by a part of a permutation": (by_part_of_a_permutation, 12, 12),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_gradients_stay(name: str) -> None:
    function, rows, keys = OTHERS[name]
    graph = aten(gradient(function), *inputs(rows, keys))
    before = calls(graph)
    assert not gather_back(graph) and calls(graph) == before
