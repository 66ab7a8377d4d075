"""`bisect` names the rewrite that was made wrong, and the call."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from tilewright.compile.stages import rewrite
from tilewright.records.case import Case, InputSpec
from tilewright.verbs.bisection import bisect_case

aten: Any = torch.ops.aten


class Model(nn.Module):
    """A convolution, a norm, attention and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.maps = nn.LayerNorm(8), nn.Linear(8, 24)
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.maps(self.norm(x)).view(2, 6, 3, 8).unbind(2)
        out = (q @ k.mT / 3).softmax(-1) @ v
        return F.leaky_relu(out * self.weight.detach().exp(), 0.1).sum(-1)


def swapped(old: Any, new: Any) -> Callable[[fx.Graph], None]:
    """Makes calls of one operator calls of another."""

    def spoil(graph: fx.Graph) -> None:
        for node in graph.find_nodes(op="call_function", target=old):
            node.target = new

    return spoil


def scaled(graph: fx.Graph) -> None:
    """Doubles the scale of attention."""
    for node in graph.nodes:
        if "scaled_dot_product" in str(node.target) and "scale" in node.kwargs:
            node.update_kwarg("scale", 2 * node.kwargs["scale"])


def shifted(graph: fx.Graph) -> None:
    """Another slope, at every leaky ReLU and its gradient."""
    for node in graph.nodes:
        if node.target in (aten.leaky_relu.default, aten.leaky_relu_backward.default):
            place = 1 if node.target is aten.leaky_relu.default else 2
            node.update_arg(place, 0.2)


FAULTS: dict[str, tuple[Callable[[fx.Graph], None], str]] = {
    "recognise_attention": (scaled, "out"),
    "simplify": (swapped(aten.exp.default, aten.expm1.default), "exp"),
    "leaky_gradient_from_result": (shifted, "leaky_relu"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_the_rewrite_and_the_call_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil, call = FAULTS[name]
    run = rewrite(name).run

    def wrong(graph: fx.Graph, target: Any, **options: Any) -> Any:
        decisions = run(graph, target, **options)
        spoil(graph)
        return decisions

    monkeypatch.setenv("TILEWRIGHT_VERIFY", "0")
    monkeypatch.setattr(rewrite(name), "run", wrong)
    found = bisect_case(Case("model", Model, InputSpec.parse_many("fp32[2,6,8]"), training=True))
    assert found.rewrite == name, found.outcome
    assert found.node is not None and call in found.node, found.outcome
    assert found.source is not None and "test_bisection.py" in found.source
    assert found.compiled <= 6


def test_right_numbers_leave_nothing_to_find() -> None:
    found = bisect_case(Case("product", lambda: operator.mul, InputSpec.parse_many("fp32[3];fp32[3]")))
    assert not found.broken and found.compiled == 1
    assert found.outcome == "every result keeps the numbers contract: there is nothing to find"
