"""Buffers that training updates: one call for many, the same values, by the executor in C++ and by its Python twin."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.contract import targets
from tests.passes.graphs import aten
from tilewright.backend import backend, recording
from tilewright.compile.stages import rewrite
from tilewright.hardware.target import target_named
from tilewright.launch.executor import EXTENSION
from tilewright.passes.in_place import write_back_together
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


def test_only_a_copy_that_nothing_else_would_see_waits_for_the_end() -> None:
    """Two small ones do; not what an input shows, what is read afterwards, what lies otherwise, or is large."""

    def program(a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor, f: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        two = (k.sin() + 1, k.cos())
        a.copy_(two[0])
        b.copy_(two[1])
        c.copy_(k)
        d.copy_(k.exp())
        read = d.tanh()
        e.copy_(k.t().neg())
        f.copy_(k.mean().expand(200, 200).abs())
        return read, two[1]

    graph = aten(program, *(torch.zeros(3, 3) for _ in range(5)), torch.zeros(200, 200), torch.ones(3, 3))
    # As AOTAutograd writes it: what is read is the input, and no copy has a reader.
    inputs = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    for write in [node for node in graph.nodes if "copy_" in str(node.target)]:
        write.replace_all_uses_with(write.args[0])
    write_back_together(graph, H200)
    graph.lint()
    (joined,) = [node for node in graph.nodes if "_foreach_copy_" in str(node.target)]
    assert joined.args[0] == [inputs["a_1"], inputs["b_1"]]
    assert len([node for node in graph.nodes if str(node.target) == "aten.copy_.default"]) == 4


def test_a_count_that_is_read_too_is_copied_and_not_counted_again() -> None:
    def program(a: Tensor, b: Tensor) -> Tensor:
        one, two = a + 1, b + 1
        a.copy_(one)
        b.copy_(two)
        return one * 2

    graph = aten(program, torch.zeros(3), torch.zeros(3))
    write_back_together(graph, H200)
    assert not [node for node in graph.nodes if "_foreach_add_" in str(node.target)]


def test_a_cpu_copies_one_by_one() -> None:
    with recording() as record:
        torch.compile(Counting(), backend=backend)(torch.randn(8, 6))
    assert together(record) == []
