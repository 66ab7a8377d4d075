"""Inputs that a graph writes to, which a recording must place, and inputs made up to time a graph."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from tests.backend.compiling import compiled, tensors
from tilewright.capture.cuda_graph import written_inputs
from tilewright.kernels.dropout_add.stream import BLOCK, SHAPE, keep
from tilewright.records import errors
from tilewright.records.errors import CaptureError
from tilewright.runtime.executable import conform, layout_of
from tilewright.runtime.stopwatch import example_inputs


def test_written_inputs_are_found_in_lists() -> None:
    graph = fx.Graph()
    x, y, z = (graph.placeholder(name) for name in "xyz")
    graph.call_function(torch.ops.aten._foreach_copy_.default, ([z, x], [y, y]))
    graph.output((y,))
    assert written_inputs(fx.GraphModule({}, graph)) == {0, 2}


def test_written_inputs_are_found_through_views() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    part = graph.call_function(torch.ops.aten.select.int, (x, 0, 1))
    graph.output((graph.call_function(torch.ops.aten.copy_.default, (part, 1.0)),))
    x.meta["val"] = torch.empty(2, 3)
    part.meta["val"] = x.meta["val"][1]
    assert written_inputs(fx.GraphModule({}, graph)) == {0}


@pytest.mark.parametrize("size", [[1], [7, 9], [512, 2048]], ids=str)
def test_the_state_of_a_draw_has_a_row_for_every_number(size: list[int]) -> None:
    graph = fx.Graph()
    stream, other = graph.placeholder("stream"), graph.placeholder("other")
    stream.meta["val"] = other.meta["val"] = torch.empty(SHAPE, dtype=torch.int32)
    graph.output(graph.call_function(keep, (stream, size, list(range(len(size))), 0.9)))
    made, _ = example_inputs(graph)
    begin, spacing = int(made[0, -1]), int(made[1, -1])
    last = begin + 2 * torch.Size(size).numel() - 1
    assert 0 <= begin < BLOCK and spacing > 0 and last // BLOCK // spacing < SHAPE[0]


def function(mean: torch.Tensor, spread: torch.Tensor, counts: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """`normal` of half and float gives half; PyTorch's fake tensors say float. Before it draws, a write, a kernel and
    views; after it all of these again, which read what came before."""
    before = F.gelu(torch.rand(4, 8) * 2)
    counts.add_(1)
    drawn = torch.normal(mean, spread)
    after = torch.rand(4, 8) + before.sin() * 3
    return drawn, after.t()[1:] * drawn[1:, None], before.softmax(-1) @ after.t(), counts.view(2, 2) * 2


def called(run: Any) -> list[torch.Tensor]:
    counts = torch.zeros(4)
    torch.manual_seed(5)
    results = run(torch.zeros(8).half(), torch.ones(8), counts)
    return [*results, counts, torch.rand(2)]


def test_the_first_call_and_later_ones_are_eager_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TILEWRIGHT_STRICT")
    monkeypatch.setattr(errors, "_warned", set())
    mine, wanted = compiled(function, fullgraph=True), called(function)
    for _ in range(3):
        torch.testing.assert_close(called(mine), wanted)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "runs as PyTorch runs it" in line]
    assert "a compiled graph at test_inputs.py" in line and "planned as torch.float32" in line


def test_strict_raises() -> None:
    with pytest.raises(CaptureError, match=r"test_inputs\.py.* a result is torch\.float16 \[8\]"):
        called(compiled(function, fullgraph=True))


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
