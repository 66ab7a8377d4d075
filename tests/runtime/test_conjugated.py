"""Tensors shown conjugated or negated by PyTorch's bits: their memory has other values than their elements."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from tests.backend.compiling import compiled, tensors
from tilewright.runtime.executable import conform, layout_of

CALLS = 4
"""The first two run in Python, later ones in C++."""
Function = Callable[..., Any]


def drawn(*shape: int, dtype: torch.dtype = torch.complex64) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype)


def agrees_with_bits(function: Function, make: Callable[[], list[torch.Tensor]], *, backward: bool = False) -> None:
    """Values, bits and gradients are eager's in every call."""
    mine = compiled(function, fullgraph=True)
    for _ in range(CALLS):
        ours, theirs = make(), make()
        for x, y in zip(ours, theirs, strict=True):
            with torch.no_grad():
                x.copy_(y)
            x.requires_grad_(backward), y.requires_grad_(backward)
        got, wanted = tensors(mine(*ours)), tensors(function(*theirs))
        assert [(x.is_conj(), x.is_neg()) for x in got] == [(x.is_conj(), x.is_neg()) for x in wanted]
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
        if backward:
            torch.autograd.backward(got, [torch.ones_like(x) for x in got])
            torch.autograd.backward(wanted, [torch.ones_like(x) for x in wanted])
            torch.testing.assert_close([x.grad for x in ours], [x.grad for x in theirs], rtol=2e-5, atol=2e-5)


def views(x: torch.Tensor, y: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Views of conjugated and negated tensors, read by the library and by kernels."""
    products = x.mH @ y, x.conj()[1:].t() @ y[1:], x.conj().view(4, 3) @ y, x.conj().imag.t() @ r
    sums = x.mH.sum(0), torch.cat([x.conj().t(), x.t()], 1), torch.fft.fft(x.mH), F.gelu(x.conj().imag.t() * 2)
    return *products, *sums


def shown(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Results that carry the bits: views of a result, of an argument, and of both at once."""
    y = x * 2
    return y.conj(), y.conj().imag.t(), x.conj()[1:], x.conj().imag, (y + 1).mH


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_views(backward: bool) -> None:
    agrees_with_bits(views, lambda: [drawn(3, 4), drawn(3, 5), drawn(3, 5, dtype=torch.float32)], backward=backward)


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_results_carry_the_bits_that_eager_s_carry(backward: bool) -> None:
    agrees_with_bits(shown, lambda: [drawn(3, 4)], backward=backward)


@pytest.mark.usefixtures("executor")
@pytest.mark.parametrize("write", [False, True], ids=["read", "written"])
def test_arguments_that_carry_the_bits(write: bool) -> None:
    def function(x: torch.Tensor, r: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if write:
            x.mul_(2 - 1j)
            r.add_(3)
        return x.t() @ x, r.t() @ r, F.gelu(r) + 1, torch.softmax(r.t(), -1), x.t()[1:] * r.t()[1:]

    agrees_with_bits(function, lambda: [drawn(3, 4).conj(), drawn(3, 4).conj().imag])


@pytest.mark.usefixtures("executor")
def test_gradients_of_results_that_carry_the_bits() -> None:
    """Backward was traced for gradients without a bit, and its kernels read memory."""

    def function(x: torch.Tensor) -> torch.Tensor:
        return F.gelu(x) * 2 + torch.sin(x)

    mine = compiled(function, fullgraph=True)
    for _ in range(CALLS):
        gradient = drawn(3, 4).conj().imag
        assert gradient.is_neg()
        x = drawn(3, 4, dtype=torch.float32)
        ours, theirs = (x.clone().requires_grad_() for _ in range(2))
        mine(ours).backward(gradient)
        function(theirs).backward(gradient)
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=2e-5, atol=2e-5)


def test_only_what_is_planned_with_a_bit_keeps_it() -> None:
    x = drawn(3, 4)
    assert conform(layout_of(x.conj()), x.conj()).is_conj()
    made = conform(layout_of(x), x.conj())
    assert not made.is_conj() and torch.equal(torch.view_as_real(made)[..., 1], -x.imag)
