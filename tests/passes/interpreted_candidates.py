"""What `test_candidates.py` runs in a process of its own: hand-written kernels that were chosen, interpreted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.interpreter import install
from tests.passes.losses import LOSSES, Head, inputs
from tilewright.backend import Recording, backend, recording
from tilewright.measure.truth.verify import verify

install()


@pytest.fixture(autouse=True)
def in_triton(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TILEWRIGHT_TARGET", "triton")
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def check(model: nn.Module, arguments: Sequence[Any], expected: set[str], training: bool = True) -> Recording:
    """Compiled, `model` runs those operators of tilewright's and keeps the numbers contract."""
    with recording() as record, torch.set_grad_enabled(training):
        compiled = torch.compile(model, backend=backend, fullgraph=True)
        result = compiled(*arguments)
        if training:
            result.sum().backward()
    model.zero_grad()
    ran = {kernel for graph in record.graphs for _, kernel in graph.plan.launches() if "tilewright" in kernel}
    assert ran == {f"tilewright.{name}.default" for name in expected}
    broken = [row for row in verify(model, compiled, arguments, training=training) if not row.ok]
    assert broken == []
    return record


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.__name__)
def test_cross_entropy(loss: Callable[[Tensor, Tensor], Tensor], dtype: torch.dtype) -> None:
    record = check(Head(loss, dtype), inputs(dtype), {"cross_entropy", "cross_entropy_backward"})
    widest = max(
        value.numel() * value.element_size()
        for graph in record.graphs
        for node in graph.plan.graph.nodes
        if isinstance(value := node.meta.get("val"), Tensor)
    )
    # Nothing of the logits' extent is kept or made in more bytes than they have.
    assert widest <= 18 * 101 * dtype.itemsize


def test_cross_entropy_without_gradients() -> None:
    check(Head(LOSSES[0], torch.bfloat16), inputs(torch.bfloat16), {"cross_entropy"}, training=False)
