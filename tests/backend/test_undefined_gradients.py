"""Results without a gradient, as logits beside a loss: backward does without it, and takes it when it comes."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.backend.compiling import assert_same
from tilewright.backend import backend, recording


class Head(nn.Module):
    """A loss, its logits and what they were computed of; all have gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(16, 40)

    def forward(self, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        hidden = x.sin()
        logits = self.project(hidden)
        return nn.functional.cross_entropy(logits.view(-1, 40), target.view(-1)), logits, hidden


def gradients(function: Any, model: nn.Module, x: Tensor, target: Tensor, uses: str) -> dict[str, Tensor | None]:
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    loss, logits, hidden = function(leaf, target)
    total = {"loss": loss, "logits": logits.square().sum(), "all": loss + logits.sum() * 3 + hidden.cos().sum()}[uses]
    total.backward()
    return {"x": leaf.grad} | {name: p.grad for name, p in model.named_parameters()}


@pytest.fixture
def head() -> tuple[nn.Module, Tensor, Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    return Head(), torch.randn(2, 6, 16), torch.randint(0, 40, (2, 6))


@pytest.mark.parametrize("order", [("loss", "loss"), ("loss", "all", "logits", "loss"), ("logits",), ("all",)], ids=str)
def test_gradients_are_eagers_whatever_is_used(order: tuple[str, ...], head: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, target = head
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    with recording() as record:
        for uses in order:
            ours = gradients(compiled, model, x, target, uses)
            assert_same(ours, gradients(model, model, x, target, uses))
    # Forward and the backward of the loss; that of all results is compiled when one of the others is used.
    assert [graph.plan.name for graph in record.graphs] == ["forward", "backward", "backward"][
        : 2 + (order != ("loss",) * 2)
    ]


def test_nothing_is_added_to_the_gradient_of_the_logits(head: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, target = head
    with recording() as record:
        torch.compile(model, backend=backend)(x, target)[0].backward()
    _, backward_ = record.graphs
    inputs = backward_.plan.graph.find_nodes(op="placeholder")
    assert sum("tangents" in node.name for node in inputs) == 1
    targets = {str(node.target) for node in backward_.plan.graph.nodes}
    assert "aten.add.Tensor" not in targets and "aten.full.default" not in targets


def test_what_was_never_used_in_a_loss_has_no_gradient(head: tuple[nn.Module, Tensor, Tensor]) -> None:
    other = nn.Parameter(torch.ones(16))

    def function(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sin().sum(), (x * other).cos()

    x = torch.randn(2, 16, requires_grad=True)
    loss, _ = torch.compile(function, backend=backend)(x)
    loss.backward()
    torch.testing.assert_close(x.grad, x.detach().cos())
    assert other.grad is None or not other.grad.any()


def test_a_gradient_that_comes_in_a_second_pass(head: tuple[nn.Module, Tensor, Tensor]) -> None:
    model, x, target = head
    compiled = torch.compile(model, backend=backend)
    leaf = x.clone().requires_grad_()
    loss, logits, _ = compiled(leaf, target)
    loss.backward(retain_graph=True)
    first = leaf.grad.clone()  # type: ignore[union-attr]
    (loss + logits.sum()).backward()
    eager = x.clone().requires_grad_()
    expected, its_logits, _ = model(eager, target)
    (2 * expected + its_logits.sum()).backward()
    assert_same(leaf.grad, eager.grad)
    assert not torch.equal(first, leaf.grad)  # type: ignore[arg-type]
