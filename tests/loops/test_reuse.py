"""Equal sets of operators are lowered once, and each gets the nest that lowering it alone would give."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.loops import reuse
from tilewright.loops.lower import lower
from tilewright.loops.reuse import Lowerings
from tilewright.operators.axes import Unfusable

aten = torch.ops.aten


def calls(function: Callable[..., object], *inputs: Tensor) -> list[fx.Node]:
    nodes = make_fx(function, tracing_mode="fake")(*inputs).graph.nodes
    return [n for n in nodes if n.op == "call_function"]


def layers(x: Tensor, y: Tensor) -> Tensor:
    """Four layers of three operators; the third reads transposed, the fourth has another number."""
    for scale, other in ((2.0, y), (2.0, x), (2.0, y.mT), (0.0, y), (-0.0, y)):
        x = aten.sigmoid(aten.mul(x, scale)) + other
    return x


def test_layers_that_differ_in_names_are_lowered_once() -> None:
    nodes = [n for n in calls(layers, torch.ones(4, 4), torch.ones(4, 4)) if n.target is not aten.transpose.int]
    parts = [nodes[i : i + 3] for i in range(0, 15, 3)]
    lowerings = Lowerings()
    with patch.object(reuse, "lower", wraps=lower) as lowered:
        found = [lowerings.lower(part, part[-1:], f"k{i}", "c++") for i, part in enumerate(parts)]
    assert found == [lower(part, part[-1:], f"k{i}", "c++") for i, part in enumerate(parts)]
    # The second layer adds its own operand again.
    assert lowered.call_count < len(parts)
    texts = [repr(one.nest) for one in found]
    assert "constant=-0.0" in texts[4] and "constant=0.0" in texts[3]


def test_a_reason_names_the_operators_of_the_set_that_was_asked_for() -> None:
    def twice(x: Tensor, y: Tensor) -> list[Tensor]:
        return [part for row in (y.cos(), y.sin()) for part in (row.exp(), x * row.exp())]

    nodes = calls(twice, torch.ones(6, 5), torch.ones(5))
    parts = [[n for n in nodes if n.target is target] for target in (aten.exp.default, aten.mul.Tensor)]
    lowerings = Lowerings()
    for exp, mul in zip(parts[0][1::2], parts[1], strict=True):
        part = [exp, mul]
        with pytest.raises(Unfusable) as alone:
            lower(part, part, "k", "c++")
        with pytest.raises(Unfusable) as reused:
            lowerings.lower(part, part, "k", "c++")
        assert str(reused.value) == str(alone.value) and exp.name in str(alone.value)


def test_what_reads_a_result_is_part_of_the_question() -> None:
    """A 16-bit value that a conversion reads is rounded as it is stored."""

    def wide_and_narrow(x: Tensor, y: Tensor) -> list[Tensor]:
        return [aten._to_copy(x.sigmoid().cos(), dtype=torch.float32), y.sigmoid().cos()]

    nodes = calls(wide_and_narrow, *torch.ones(2, 8, dtype=torch.bfloat16))
    parts = [nodes[:2], nodes[3:5]]
    lowerings = Lowerings()
    first, second = (lowerings.lower(part, part[-1:], "k", "c++") for part in parts)
    assert [first, second] == [lower(part, part[-1:], "k", "c++") for part in parts]
    assert len(first.nest.steps) > len(second.nest.steps)
