"""Softmax and variance along an axis that is not the last, on a CPU: cut into sums over columns, the same numbers."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.contract import keeps_contract
from tests.passes.graphs import aten, calls, run
from tilewright.hardware.target import target_named
from tilewright.passes.strided_rows import split_strided_rows

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "softmax": lambda x: x.softmax(1),
    "log softmax": lambda x: x.log_softmax(1),
    "log softmax of the first axis": lambda x: x.log_softmax(0).sin(),
    "logarithm of sums": lambda x: x.logsumexp(1),
    "variance": lambda x: x.var(1),
    "variance of two axes": lambda x: x.var((0, 1), correction=0),
    "deviation": lambda x: x.std(1, keepdim=True) + x,
    "variance and mean": lambda x: torch.add(*torch.var_mean(x, (0, 1))),
}
SHAPE = (5, 37, 18, 17)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_kernels_over_columns_keep_the_contract(name: str, dtype: torch.dtype) -> None:
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)).to(dtype).requires_grad_()
    record = keeps_contract(PROGRAMS[name], [x])
    ran = [call for graph in record.graphs for call in calls(graph.plan.graph)]
    assert not any(word in call for call in ran for word in ("softmax", "logsumexp", "var", "std"))


def test_special_values_are_eagers() -> None:
    x = torch.randn(40, 600)
    x[:, 0], x[3, 1], x[4, 2], x[5, 3] = -torch.inf, -torch.inf, torch.inf, torch.nan

    def program(x: Tensor) -> tuple[Tensor, ...]:
        safe = torch.ops.aten._safe_softmax.default(x, 0)
        return x.softmax(0), x.log_softmax(0), safe, x.var(0), x.logsumexp(0, keepdim=True), x.logsumexp((0,))

    graph = aten(program, x)
    split_strided_rows(graph, target_named("cpu"))
    assert not any("softmax" in call or "var" in call for call in calls(graph))
    torch.testing.assert_close(run(graph, x), program(x), equal_nan=True)


STAY = {
    "last": (torch.zeros(40, 600), 1),
    "narrow": (torch.zeros(600, 40, 4), 1),
    "small": (torch.zeros(20, 30), 0),
    "float64": (torch.zeros(600, 40, dtype=torch.float64), 0),
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays_one_nest(name: str) -> None:
    x, axis = STAY[name]
    graph = aten(lambda x: x.softmax(axis), x)
    split_strided_rows(graph, target_named("cpu"))
    assert calls(graph) == ["_softmax.default"]
