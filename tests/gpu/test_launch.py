"""Triton kernels of compiled models launched from C++: the same bits, on side streams, in graphs and in threads."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.gpu.kernels.launching import in_four_threads, on_a_side_stream, replayed, values_of
from tilewright.backend import backend
from tilewright.launch.executor import EXTENSION
from tilewright.launch.generated import TritonKernel

pytestmark = pytest.mark.gpu
GPU = "cuda:0"


class Gated(nn.Module):
    """Norms, a gate and sums over rows and columns; no library call adds in an order of its own."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.gate = nn.Parameter(torch.randn(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.gelu(self.first(x)) * torch.sigmoid(self.gate)
        result: torch.Tensor = self.second(y + x).softmax(-1).mT.exp()
        return result


Call = Callable[[torch.Tensor], torch.Tensor]


def model(monkeypatch: pytest.MonkeyPatch, width: int = 384) -> tuple[Call, list[torch.Tensor]]:
    """A compiled model whose kernels C++ launches, its input, and what Triton's own launches gave."""
    call: Call = torch.compile(Gated(width).to(GPU), backend=backend, dynamic=False)
    x = torch.randn(3, 77, width, device=GPU, requires_grad=True)
    with monkeypatch.context() as without:
        without.setattr(EXTENSION, "found", None)
        without.setattr(EXTENSION, "module", lambda: None)
        by_triton = values_of(call, [x])
    EXTENSION.module()
    assert EXTENSION.wait()
    values_of(call, [x])
    monkeypatch.setattr(TritonKernel, "launch", lambda *_: pytest.fail("Triton launched a kernel"))
    return call, [x, *by_triton]


@pytest.mark.parametrize("width", [1, 13, 384])
def test_the_same_bits(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    call, (x, *by_triton) = model(monkeypatch, width)
    for way in (values_of, on_a_side_stream, replayed):
        for mine, true in zip(way(call, [x]), by_triton, strict=True):
            assert torch.equal(mine, true)


def test_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    call, (x, *by_triton) = model(monkeypatch)
    # A leaf of each thread's own: autograd warns of one whose gradients come from several streams.
    for values in in_four_threads(call, lambda: [x.detach().clone().requires_grad_()]):
        assert all(torch.equal(mine, true) for mine, true in zip(values, by_triton, strict=True))


def test_what_begins_elsewhere_goes_by_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    call, (x, *by_triton) = model(monkeypatch)
    monkeypatch.undo()
    shifted = torch.empty(x.numel() + 1, device=GPU)[1:].view(x.shape).copy_(x.detach()).requires_grad_()
    for mine, true in zip(values_of(call, [shifted]), by_triton, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-5, atol=1e-6)
