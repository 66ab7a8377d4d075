"""Gradients of gradients of compiled programs, and forward-mode derivatives inside of them, are eager's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend.compiling import assert_same, compiled
from tilewright.backend import recording
from tilewright.records.errors import CaptureError

Function = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture
def weight() -> Tensor:
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).requires_grad_()


def network(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w).square().sum(1)


def penalty(run: Function, w: Tensor) -> list[Tensor]:
    """Gradients of a loss with the norm of a gradient."""
    x = torch.linspace(-1, 1, 24).reshape(3, 8).requires_grad_()
    y = run(x, w)
    (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return list(torch.autograd.grad(y.mean() + (gradient.norm(dim=1) - 1).square().mean(), [x, w]))


def third(run: Function, w: Tensor) -> list[Tensor]:
    x = torch.ones(3, 8, requires_grad=True)
    y = run(x, w).sum()
    for _ in range(2):
        y = torch.autograd.grad(y, x, create_graph=True)[0].square().sum()
    return list(torch.autograd.grad(y, [x, w]))


def in_place(run: Function, w: Tensor) -> list[Tensor]:
    """The gradients are no views, whose changes in place autograd would refuse."""
    x = torch.linspace(-1, 1, 24).reshape(3, 8).requires_grad_()
    gradients = torch.autograd.grad(run(x, w).sum(), [x, w], create_graph=True)
    return list(torch.autograd.grad(sum(g.mul_(2).square().sum() for g in gradients), [x, w]))


def hessian(run: Function, w: Tensor) -> list[Tensor]:
    """PyTorch gives zeros where a gradient does not depend on the input."""
    return [torch.autograd.functional.hessian(lambda x: run(x, w).sum(), torch.ones(2, 8))]


@pytest.mark.usefixtures("executor")
def test_gradients_of_gradients_are_eagers(weight: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TILEWRIGHT_STRICT", "0")
    run = compiled(network)
    with recording() as record:
        # The first call is AOTAutograd's, the others are the executor's.
        for derive in (penalty, in_place, penalty, in_place, third, hessian):
            for ours, eager in zip(derive(run, weight), derive(network, weight), strict=True):
                assert_same(ours, eager)
    assert {found.what for found in record.fallbacks} == {"a second derivative of the graph"}


def test_the_strict_mode_says_that_pytorch_would_run_it(weight: Tensor) -> None:
    with pytest.raises(CaptureError, match=r"a second derivative of the graph .* differentiates a compiled graph once"):
        penalty(compiled(network), weight)


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize(
    ("model", "why"),
    [
        (nn.Dropout(0.5), "the call drew random numbers"),
        (nn.BatchNorm1d(8), "the call wrote to an input, or returned a view"),
        (nn.ConstantPad1d(1, 0.5), "an input of the call was freed or changed before"),
    ],
)
def test_what_cannot_run_again_is_an_error(model: nn.Module, why: str) -> None:
    run, x = compiled(model), torch.rand(3, 8, requires_grad=True)
    run(x)
    # A padding keeps nothing for its backward.
    y = run(x * 2 if isinstance(model, nn.ConstantPad1d) else x)
    (gradient,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match=why):
        gradient.sum().backward()


def test_a_view_of_another_graphs_result_is_not_taken_for_this_graphs(weight: Tensor) -> None:
    def views(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        t = (x @ w + b).sin()
        return x.t(), t[:1], t[1:]

    def derive(one: Callable[..., Tensor], other: Callable[..., Any]) -> tuple[Tensor, ...]:
        x, b = torch.ones(2, 8, requires_grad=True), torch.ones(6, requires_grad=True)
        results = other(one(x, weight), weight.sin()[:6, :6], b)
        return torch.autograd.grad(sum(y.square().sum() for y in results), [x, weight, b], create_graph=True)

    def product(x: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(x @ w)

    for ours, eager in zip(derive(compiled(product), compiled(views)), derive(product, views), strict=True):
        assert_same(ours, eager)


FORWARD: dict[str, Function] = {
    "jvp": lambda x, w: torch.func.jvp(lambda x: network(x, w), (x,), (torch.ones_like(x),))[1],
    "jacfwd": lambda x, w: torch.func.jacfwd(lambda x: network(x, w))(x),
    "hessian": lambda x, w: torch.func.hessian(lambda x: network(x, w).sum())(x),
    "hvp": lambda x, w: torch.func.jvp(torch.func.grad(lambda x: network(x, w).sum()), (x,), (torch.ones_like(x),))[1],
}


def test_forward_mode_inside_is_eagers(weight: Tensor) -> None:
    """Its tangents begin as zeros without memory."""

    def function(x: Tensor, w: Tensor) -> list[Any]:
        return [derive(x, w) for derive in FORWARD.values()]

    x = torch.linspace(-1, 1, 16).reshape(2, 8)
    for ours, eager in zip(compiled(function)(x, weight), function(x, weight), strict=True):
        assert_same(ours, eager)
