"""Compiled graphs by the executor in C++: the same results as by the Python twin, whatever the steps are."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from tests.backend.compiling import compiled
from tilewright.backend import backend, recording
from tilewright.runtime.executable import (
    CallStep,
    Executable,
    IndexOutOfBounds,
    KernelStep,
    PlanMismatch,
    conform,
    layout_of,
)
from tilewright.runtime.native import Native
from tilewright.runtime.pool import pool

pytestmark = pytest.mark.usefixtures("executor")
CPU = torch.device("cpu")


def native(function: Callable[..., Any], inputs: Sequence[Any]) -> tuple[Callable[..., Any], list[Executable]]:
    """`function` compiled, from now on run by the executor."""
    with recording() as record:
        made = compiled(function)
        made(*inputs)
    executables = [graph.executable for graph in record.graphs if graph.executable]
    for executable in executables:
        executable.native = Native(CPU)
    return made, executables


class Steps(nn.Module):
    """Kernels, products, views, lists of tensors, several results of one call, and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(12), nn.Linear(12, 24)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = torch.nn.functional.gelu(self.linear(self.norm(x)))
        first, second = y.chunk(2, -1)
        values, places = torch.topk(first @ second.mT, 2, -1)
        parts = torch.cat([values, values.flip(-1)], -1)
        return parts, places, y.new_tensor([1.0, 2.0]) + values


def test_inference_and_training_as_in_python() -> None:
    model = Steps()
    mine, executables = native(copy.deepcopy(model), [torch.randn(3, 5, 12, requires_grad=True)])
    assert executables
    for _ in range(2):
        x, y = (torch.randn(3, 5, 12, generator=torch.Generator().manual_seed(1)).requires_grad_() for _ in (1, 2))
        got, wanted = mine(x), model(y)
        torch.testing.assert_close(got, wanted, rtol=2e-5, atol=2e-5)
        got[0].sum().backward()
        wanted[0].sum().backward()
        torch.testing.assert_close(x.grad, y.grad, rtol=2e-5, atol=2e-5)
    with torch.no_grad():
        torch.testing.assert_close(mine(x.detach()), model(x.detach()), rtol=2e-5, atol=2e-5)


def test_an_operator_that_breaks_its_promise_falls_back_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TILEWRIGHT_STRICT")
    x = torch.randn(4, 6)
    mine, (executable,) = native(lambda x: torch.relu(x @ x.mT) + 1, [x])
    wanted = torch.relu(x @ x.mT) + 1
    (product,) = [step for step in executable.steps if isinstance(step, CallStep) and "mm" in step.name]
    assert product.spec is not None or product.out is not None
    product.spec = product.spec or product.out
    product.out, product.operator = None, None
    product.target = lambda x, y: (x @ y).double()
    executable._was_right = False
    for _ in range(2):
        torch.testing.assert_close(mine(x), wanted, check_dtype=False)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "runs as PyTorch runs it" in line]
    assert "planned as" in line


def test_a_result_planned_to_share_elements_falls_back_with_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's fake tensor of this operator has the strides of an expanded operand; the operator gives dense ones."""
    monkeypatch.delenv("TILEWRIGHT_STRICT")

    def function(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.as_strided_scatter(x, y, (2,), (1,)) * 2

    inputs = [torch.randn(1, 5).expand(7, 5), torch.ones(2)]
    made = torch.compile(function, backend=backend, fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(made(*inputs), function(*inputs))
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "runs as PyTorch runs it" in line]
    assert "planned" in line
    with pytest.raises(PlanMismatch, match=r"strides \(5, 1\), planned as \(0, 1\)"):
        conform(layout_of(inputs[0]), torch.ones(7, 5))


@pytest.mark.parametrize("by", ["native", "twin"])
def test_tensors_without_memory_go_pytorchs_way(by: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    x = torch.randn(8, 8)
    mine, (executable,) = native(lambda x: torch.softmax(x + 1, -1), [x])
    if by == "twin":
        executable.native = None
    with FakeTensorMode() as mode:
        (y,) = executable([mode.from_tensor(x)])
    assert y.shape == (8, 8) and type(y) is not torch.Tensor
    torch.testing.assert_close(mine(x), torch.softmax(x + 1, -1))


def test_an_index_outside_is_the_same_error_as_in_python() -> None:
    table, indices = torch.randn(10, 4), torch.tensor([1, 12])
    mine, (executable,) = native(lambda t, i: torch.nn.functional.embedding(i % 16, t) + 1, [table, indices % 10])
    assert any(isinstance(step, KernelStep) for step in executable.steps)
    for _ in range(2):
        with pytest.raises(IndexOutOfBounds, match="index out of bounds for a dimension of size 10"):
            mine(table, indices)
        torch.testing.assert_close(mine(table, indices % 10), table[indices % 10] + 1)


def test_kernels_and_products_of_a_cpu_run_without_python() -> None:
    """A profiler is told of the kernels by their regions' names; large results come from the pool."""
    x = torch.randn(600, 500)
    mine, (executable,) = native(lambda x: torch.relu(x @ x.mT) + 1, [x])
    assert any(isinstance(step, KernelStep) for step in executable.steps)
    for step in executable.steps:
        step.run = None  # type: ignore[method-assign, assignment]
    pool.trim()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        result = mine(x)
    torch.testing.assert_close(result, torch.relu(x @ x.mT) + 1)
    names = {event.key for event in profiler.key_averages()}
    assert {"aten::mm", *(step.name for step in executable.kernels)} <= names
    assert pool.live_bytes >= result.nbytes
