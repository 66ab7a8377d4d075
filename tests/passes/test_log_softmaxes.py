"""Log-softmax of long rows from two numbers a row: the numbers, what is kept for backward, and what stays."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.passes.graphs import aten, calls, planned, run, written
from tilewright.choose.kernels import choose_candidates
from tilewright.choose.sums import sum_by_index
from tilewright.hardware.target import target_named
from tilewright.measure.truth.contract import compare
from tilewright.passes.loss import compute_where_read
from tilewright.passes.simplify import simplify

H200 = target_named("h200")
ROWS, COLUMNS = 2048, 4096


def index(x: Tensor) -> Tensor:
    return (torch.arange(len(x), device=x.device) ** 2 % 1013)[:, None]


def wide(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def picked(x: Tensor, other: Tensor) -> Tensor:
    return wide(x).log_softmax(-1).gather(-1, index(x))[:, 0]


def with_entropy(x: Tensor, other: Tensor) -> Tensor:
    y = wide(x).log_softmax(-1)
    return y.gather(1, index(x))[:, 0] - (y.exp() * y).sum(-1)


def distilled(x: Tensor, other: Tensor) -> Tensor:
    mine, theirs = wide(x).log_softmax(-1), wide(other).log_softmax(-1)
    return F.kl_div(mine, theirs, log_target=True, reduction="batchmean")


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "picked": picked,
    "in 16 bits": lambda x, _: x.log_softmax(-1).gather(1, index(x))[:, 0],
    "with entropy": with_entropy,
    "distilled": distilled,
}


def logits(scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(scale * torch.randn(ROWS, COLUMNS, generator=generator).bfloat16() for _ in "ab")  # type: ignore[return-value]


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("scale", [3.0, 300.0])
def test_numbers_stay(name: str, scale: float) -> None:
    function, (x, other) = LOSSES[name], logits(scale)
    graph = aten(function, x, other)
    compute_where_read(graph, H200)
    assert "_log_softmax.default" not in calls(graph)
    found, exact = run(graph, x, other), function(x.double(), other.double())
    tolerance = torch.finfo(found.dtype).eps if found.dtype == torch.bfloat16 else 1e-4
    torch.testing.assert_close(found.double(), exact, rtol=tolerance, atol=tolerance)


class Loss(torch.nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.scale = function, torch.nn.Parameter(torch.ones(COLUMNS, dtype=torch.bfloat16))

    def forward(self, x: Tensor, other: Tensor) -> Tensor:
        return self.function(x * self.scale, other).sum()


@pytest.mark.parametrize("name", LOSSES)
def test_no_row_of_probabilities_is_written_or_kept(name: str) -> None:
    plan = planned(Loss(LOSSES[name]), ",".join([f"bf16[{ROWS},{COLUMNS}]"] * 2))
    assert not [x for x in written(plan.graphs) if x.numel() >= ROWS * COLUMNS and x.dtype == torch.float32]
    for graph in plan.graphs:
        assert not {"tilewright.index_sums.default", "tilewright.softmax.default"} & set(calls(graph.graph))


class OfParameter(torch.nn.Module):
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.x = function, torch.nn.Parameter(torch.ones(ROWS, COLUMNS))

    def forward(self, other: Tensor) -> Tensor:
        return self.function(self.x, other.detach())


@pytest.mark.parametrize("name", [*LOSSES, "with labels"])
def test_of_logits_in_fp32_the_gradient_alone_is_written(name: str) -> None:
    """Not the softmax, for a kernel that would read it from memory."""
    plan = planned(OfParameter(LOSSES.get(name, with_labels)), f"fp32[{ROWS},{COLUMNS}]")
    assert sum(x.numel() == ROWS * COLUMNS for x in written(plan.graphs)) == 1


def with_labels(x: Tensor, other: Tensor) -> Tensor:
    return 4 * distilled(x / 2, other / 2) + F.cross_entropy(wide(x), index(x)[:, 0].where(index(x)[:, 0] > 99, -100))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_cross_entropy_beside_another_softmax(dtype: torch.dtype) -> None:
    """Its kernel computes the loss; its gradient is added to the other in one generated kernel, so none is written."""

    def program(x: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
        x = x.detach().requires_grad_()
        loss = with_labels(x, other)
        return loss, torch.autograd.grad(loss, x)[0]

    generator = torch.Generator().manual_seed(4)
    x, other = ((3 * torch.randn(ROWS, COLUMNS, generator=generator)).to(dtype) for _ in "ab")
    graph = aten(program, x, other)
    simplify(graph, target_named("cpu"))
    compute_where_read(graph, H200)
    choose_candidates(graph, H200)
    assert "tilewright.cross_entropy.default" in calls(graph)
    assert "tilewright.cross_entropy_backward.default" not in calls(graph)
    results = run(graph, x, other), program(x, other), program(x.double(), other.double())
    for mine, eager, exact in zip(*results, strict=True):
        row = compare(mine, eager, exact)
        assert row.ok, row


def test_the_gradient_of_a_pick_is_computed_where_it_is_read() -> None:
    def gradient(g: Tensor, x: Tensor, index: Tensor) -> Tensor:
        picks = x.gather(1, index)
        return torch.zeros_like(x).scatter_add(1, index, g * picks) * 2

    g, x = torch.randn(50, 1), torch.randn(50, 5000)
    index = torch.randint(5000, (50, 1), generator=torch.Generator().manual_seed(0))
    graph = aten(gradient, g, x, index)
    (decision,) = sum_by_index(graph, H200)
    assert decision.verdict == "taken" and "where they are read" in decision.reason
    assert not any("sums" in call or "scatter" in call for call in calls(graph))
    torch.testing.assert_close(run(graph, g, x, index), gradient(g, x, index), rtol=0, atol=0)
