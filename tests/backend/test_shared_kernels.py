"""Regions that compute the same run one kernel, whichever layer or graph they are in."""

import torch
from torch import nn

from tests.backend.compiling import agrees
from tilewright.backend import Recording


class Layers(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(count))
        self.linears = nn.ModuleList(nn.Linear(24, 24) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for norm, linear in zip(self.norms, self.linears, strict=True):
            x = x + nn.functional.gelu(linear(norm(x)))
        return x


def sources(record: Recording) -> tuple[int, int]:
    """How many kernels the first graph has, and how many sources these have."""
    found = list(record.graphs[0].plan.sources.values())
    return len(found), len(set(found))


def test_equal_layers_share_their_kernels() -> None:
    x = torch.randn(10, 24, requires_grad=True)
    fewer, few = sources(agrees(Layers(5), (x,), backward=True))
    torch._dynamo.reset()
    more, distinct = sources(agrees(Layers(9), (x,), backward=True))
    assert distinct == few < fewer < more


def signed_zeros(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.copysign(x.exp(), torch.where(w > 9, w, 0.0)) @ torch.copysign(w.exp(), torch.where(w > 9, w, -0.0))


def test_constants_that_only_compare_equal_are_two_kernels() -> None:
    kernels, distinct = sources(agrees(signed_zeros, torch.randn(2, 6, 6).unbind()))
    assert kernels == distinct


def test_regions_keep_names_of_their_own() -> None:
    record = agrees(Layers(4), (torch.randn(10, 24),))
    graph = record.graphs[0]
    names = [region.name for region in graph.plan.fusion.regions]
    assert len(set(names)) == len(names) > len({region.kernel for region in graph.plan.fusion.regions})
    assert [step.name for step in graph.executable.kernels] == [
        n for n, kind in graph.plan.launches() if kind == "kernel"
    ]
