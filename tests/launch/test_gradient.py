"""A gradient as plain data: what the other operator is called with, by the executor's node and by PyTorch's."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch

from tilewright.launch.builder import RecipeBuilder, operands_of
from tilewright.launch.executor import EXTENSION, native_recipe
from tilewright.launch.gradient import Gradient, HasInput, Input, OutputGrad, Saved

Call = Callable[..., Any]
calls: list[tuple[Any, ...]] = []


def backward(dy: torch.Tensor, dz: torch.Tensor | None, *rest: Any) -> tuple[torch.Tensor, torch.Tensor]:
    calls.append((dy, dz, *rest))
    if "fail" in rest[-2:]:
        raise KeyError("mine")
    total = dy if dz is None else dy + dz
    return 10 * total, total


GRADIENT = Gradient(
    backward,
    (
        OutputGrad(0),
        OutputGrad(1, is_optional=True),
        Input(0),
        Input(1),
        HasInput(1),
        Saved(0),
        Saved(2),
        Input(2),
        "constant",
    ),
    (1, 0, None),
    differentiable=2,
)
"""The operator copies(x, other, how): three copies of x, the last without a gradient."""


@pytest.fixture(params=["native", "python"])
def copies(request: pytest.FixtureRequest) -> Call:
    calls.clear()
    if request.param == "python":
        return _Copies.apply  # type: ignore[no-any-return]
    module: ModuleType = EXTENSION.load(EXTENSION.built())

    def build(*arguments: Any) -> Any:
        operands = operands_of([x for x in arguments if isinstance(x, torch.Tensor)])
        call = RecipeBuilder("tested::copies", operands, compiled=True)
        return native_recipe(module, call.finish(*(call.copy(operands[0]) for _ in range(3))))

    known = module.operator(False, build, GRADIENT.as_data("TestedCopies"))
    return lambda *arguments: module.call(known, *arguments)


class _Copies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor | None, how: str) -> tuple[torch.Tensor, ...]:
        results = tuple(x.clone() for _ in range(3))
        GRADIENT.save(ctx, (x, other, how), results)
        return results

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        return GRADIENT.backward(ctx, *gradients)


def test_arguments_and_results_of_the_call(copies: Call) -> None:
    x, other = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    y, z, rest = copies(x, other, "so")
    assert y.requires_grad and z.requires_grad and not rest.requires_grad
    dy, dz = torch.randn(3), torch.randn(3)
    dx, d_other = torch.autograd.grad((y, z), (x, other), (dy, dz))
    torch.testing.assert_close((dx, d_other), (dy + dz, 10 * (dy + dz)))
    (call,) = calls
    for one, expected in zip(call, (dy, dz, x, other, True, y, rest, "so", "constant"), strict=True):
        assert torch.equal(one, expected) if isinstance(expected, torch.Tensor) else one == expected


def test_what_is_absent(copies: Call) -> None:
    x = torch.randn(3, requires_grad=True)
    y, _, _ = copies(x, None, "so")
    torch.testing.assert_close(torch.autograd.grad(y, x, torch.ones(3))[0], torch.ones(3))
    _, dz, _, other, is_given, *_ = calls.pop()
    assert dz is None and other is None and is_given is False
    # Zeros stand for a gradient that did not come and must be there.
    _, z, _ = copies(x, None, "so")
    torch.testing.assert_close(torch.autograd.grad(z, x, torch.ones(3))[0], torch.ones(3))
    assert torch.equal(calls.pop()[0], torch.zeros(3))


def test_tensors_are_let_go_after_a_backward(copies: Call) -> None:
    x = torch.randn(3, requires_grad=True)
    y, z, _ = copies(x, None, "so")
    torch.autograd.grad(y, x, torch.ones(3), retain_graph=True)
    torch.autograd.grad(y, x, torch.ones(3))
    with pytest.raises(RuntimeError, match="a second time"):
        torch.autograd.grad(z, x, torch.ones(3))


def test_an_error_of_the_call_arrives(copies: Call) -> None:
    x = torch.randn(3, requires_grad=True)
    y, _, _ = copies(x, torch.ones(3), "fail")
    with pytest.raises(KeyError, match="mine"):
        torch.autograd.grad(y, x, torch.ones(3))
