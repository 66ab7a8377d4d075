"""Sums along a short axis, written as additions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.passes.graphs import aten, calls, run, stays
from tilewright.hardware.target import target_named
from tilewright.passes.short_sums import add_short_sums

H200, CPU = target_named("h200"), target_named("cpu")


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("shape", "dim"), [((7, 2, 33), 1), ((8, 5, 1, 3), 0), ((4, 3, 6), -2)])
@pytest.mark.parametrize("keepdim", [False, True])
def test_few_terms_are_added(shape: tuple[int, ...], dim: int, keepdim: bool, dtype: torch.dtype) -> None:
    x = drawn(*shape, dtype=dtype)
    graph = aten(lambda x: x.sum(dim, keepdim=keepdim), x)
    add_short_sums(graph, H200)
    assert calls(graph).count("add.Tensor") == shape[dim] - 1 and "sum.dim_IntList" not in calls(graph)
    exact = x.double().sum(dim, keepdim=keepdim)
    found = run(graph, x)
    assert found.dtype == dtype and found.shape == exact.shape
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(found.double(), exact, rtol=eps, atol=8 * eps * (dtype.itemsize > 2))


def with_its_sum(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x.exp()
    return y, y.sum(0)


UNCHANGED: dict[str, tuple[Callable[..., object], Tensor]] = {
    "the last axis": (lambda x: x.sum(-1), drawn(7, 9, 4)),
    "contiguous along the axis": (lambda x: x.transpose(1, 2).sum(1), drawn(7, 9, 4)),
    "a long axis": (lambda x: x.sum(1), drawn(7, 9, 4)),
    "a single term": (lambda x: x.sum(1), drawn(7, 1, 4)),
    "two axes": (lambda x: x.sum((0, 1)), drawn(2, 2, 4)),
    "a wider result": (lambda x: x.sum(0, dtype=torch.float64), drawn(2, 4)),
    "integers": (lambda x: x.long().sum(0), drawn(2, 4)),
    "read by others": (with_its_sum, drawn(2, 4)),
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_other_sums_stay(name: str) -> None:
    stays(lambda graph: add_short_sums(graph, H200), *UNCHANGED[name])


def test_on_a_cpu_all_stay() -> None:
    stays(lambda graph: add_short_sums(graph, CPU), lambda x: x.sum(0), drawn(2, 4))
