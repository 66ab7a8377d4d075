"""Buffers that training updates: one call for many, the same values, by the executor in C++ and by its Python twin."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract import targets
from tilewright.backend import backend, recording
from tilewright.hardware.target import target_named
from tilewright.launch.executor import EXTENSION
from tilewright.passes.stages import rewrite
from tilewright.passes.write_back import write_back_together
from tilewright.runtime.native import Native

H200, CPU = target_named("h200"), torch.device("cpu")


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rewrite("write_back_together"), "run", lambda graph, target: write_back_together(graph, H200))
    torch._dynamo.reset()


class Counting(nn.Module):
    """Three batch norms, and buffers that are written and then read, swapped, and large."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.BatchNorm1d(6) for _ in range(3))
        self.calls: Tensor
        self.left: Tensor
        self.right: Tensor
        self.large: Tensor
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("left", torch.arange(4.0))
        self.register_buffer("right", -torch.arange(4.0))
        self.register_buffer("large", torch.zeros(200, 200))

    def forward(self, x: Tensor) -> Tensor:
        for norm in self.norms:
            x = norm(x)
        self.calls += 1
        left = self.left.clone()
        self.left.copy_(self.right)
        self.right.copy_(left * 2)
        self.large.add_(1)
        return x * self.calls


def together(record: Any) -> list[str]:
    return [target for target in targets(record) if "_foreach" in target]


@pytest.mark.parametrize("native", [False, True], ids=["Python", "C++"])
def test_buffers_are_eagers(native: bool, as_on_a_gpu: None) -> None:
    model = Counting()
    mine = copy.deepcopy(model)
    with recording() as record:
        made = torch.compile(mine, backend=backend, fullgraph=True)
        x = torch.randn(8, 6)
        torch.testing.assert_close(made(x), model(x))
        if native:
            EXTENSION.module()
            assert EXTENSION.wait()
            for graph in record.graphs:
                assert graph.executable is not None
                graph.executable.native = Native(CPU)
        for _ in range(3):
            x = torch.randn(8, 6)
            torch.testing.assert_close(made(x), model(x))
    assert sorted(together(record)) == ["aten._foreach_add_.Scalar", "aten._foreach_copy_.default"]
    for (name, ours), theirs in zip(mine.named_buffers(), model.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=name)


def test_a_cpu_copies_one_by_one() -> None:
    with recording() as record:
        torch.compile(Counting(), backend=backend)(torch.randn(8, 6))
    assert together(record) == []
