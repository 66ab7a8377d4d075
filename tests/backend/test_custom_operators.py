"""Custom operators whose gradients read data: calls of one operator, the rest of the graph is compiled."""

from typing import Any

import pytest
import torch
from torch import Tensor

from tilewright.backend import backend, recording
from tilewright.records.errors import CaptureError


@torch.library.custom_op("tests_custom::grouped", mutates_args=())
def grouped(x: Tensor, w: Tensor, ends: Tensor, factor: float) -> Tensor:
    """Rows [N, K] times the matrix [K, M] of their group; `ends` [G] are the groups' last rows, w [G, K, M]."""
    result, begin = x.new_zeros(x.shape[0], w.shape[2]), 0
    for group, end in enumerate(ends.tolist()):
        if begin != end:
            result[begin:end] = x[begin:end] @ w[group] * factor
        begin = end
    return result


@grouped.register_fake
def _(x: Tensor, w: Tensor, ends: Tensor, factor: float) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[2])


def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, w, ctx.ends, ctx.factor = inputs
    ctx.save_for_backward(x, w)
    ctx.shape = x.shape


def gradient(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, w = ctx.saved_tensors
    dx, dw, begin = x.new_zeros(ctx.shape), torch.zeros_like(w), 0
    for group, end in enumerate(ctx.ends.tolist()):
        if begin != end:
            dx[begin:end] = dy[begin:end] @ w[group].T * ctx.factor
            dw[group] = x[begin:end].T @ dy[begin:end] * ctx.factor
        begin = end
    return (dx, dw if ctx.needs_input_grad[1] else None, None, None)


grouped.register_autograd(gradient, setup_context=setup)


def experts(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    sent: Tensor = grouped(x.sin() * 2, w.exp(), ends, 0.5)
    return torch.nn.functional.gelu(sent).tanh().sum()


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_gradient_that_reads_data_is_one_call(dynamic: bool) -> None:
    run = torch.compile(experts, backend=backend, dynamic=dynamic)
    generator = torch.Generator().manual_seed(3)
    with recording() as record:
        for rows, ends in ((7, [2, 2, 7]), (7, [0, 5, 7]), (9, [1, 2, 9])):
            x = torch.randn(rows, 9, generator=generator, requires_grad=True)
            w = torch.randn(3, 9, 4, generator=generator, requires_grad=True)
            ours, theirs = (each(x, w, torch.tensor(ends)) for each in (run, experts))
            torch.testing.assert_close(ours, theirs)
            expected = torch.autograd.grad(theirs, (x, w))
            for _ in range(2):
                torch.testing.assert_close(torch.autograd.grad(ours, (x, w), retain_graph=True), expected)
            # Those that need none get none.
            (dx,) = torch.autograd.grad(run(x, w.detach(), torch.tensor(ends)), x)
            torch.testing.assert_close(dx, expected[0])
    assert {fallback.what for fallback in record.fallbacks} <= {
        "tests_custom.grouped.default",
        "tilewright_custom.backward.default",
    }
    for graph in record.graphs:
        steps = graph.executable.steps
        assert sum(step.name in ("grouped", "backward") for step in steps) == 1
        assert any(step.generated for step in steps)


def test_what_may_change_is_not_kept_as_a_constant(monkeypatch: pytest.MonkeyPatch) -> None:
    def setup_with_an_object(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.ends, ctx.holder = inputs[1], [object()]

    def scaled(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * (2 if ctx.ends.tolist()[0] else 3), None

    operator = torch.library.custom_op(
        "tests_custom::held", lambda x, ends: x * 2, mutates_args=(), schema="(Tensor x, Tensor ends) -> Tensor"
    )
    operator.register_fake(lambda x, ends: torch.empty_like(x))
    operator.register_autograd(scaled, setup_context=setup_with_an_object)
    x, ends = torch.randn(5, requires_grad=True), torch.tensor([1])
    with pytest.raises(CaptureError, match="the gradient of a custom operator holds a object, which may change"):
        torch.compile(lambda x, ends: operator(x.sin(), ends).exp(), backend=backend)(x, ends)
    monkeypatch.setenv("TILEWRIGHT_STRICT", "0")
    result = torch.compile(lambda x, ends: operator(x.sin(), ends).exp(), backend=backend)(x, ends)
    expected = (x.sin() * 2).exp() * 2 * x.cos()
    torch.testing.assert_close(torch.autograd.grad(result.sum(), x)[0], expected.detach())
