"""`nn.MultiheadAttention` whose weights nobody reads, as for a GPU."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.passes.attention.spellings import draw
from tests.passes.attention.test_recognise import check_numbers, value_and_gradients
from tilewright.hardware.target import target_named
from tilewright.passes.attention.sdpa import leave_weights_out
from tilewright.records.program import Decision

B, S, E, HEADS = 2, 7, 24, 3
Function = Callable[..., Any]


class Settled:
    """A function whose calls were rewritten for `device`."""

    def __init__(self, function: Function, device: str = "h200") -> None:
        torch._dynamo.reset()
        self.device = device
        self.decisions: list[Decision] = []
        self.call = torch.compile(function, backend=self.backend, fullgraph=True)

    def backend(self, gm: GraphModule, _: Sequence[Tensor]) -> Callable[..., object]:
        self.decisions = leave_weights_out(gm.graph, target_named(self.device))
        gm.recompile()
        return gm


def attention(**options: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    return nn.MultiheadAttention(E, HEADS, batch_first=True, **options)


def self_attention(module: nn.MultiheadAttention, **options: Any) -> Function:
    def function(x: Tensor) -> Tensor:
        out: Tensor = module(x, x, x, **options)[0]
        return out

    return function


def causal(module: nn.MultiheadAttention) -> Function:
    def function(x: Tensor) -> Tensor:
        mask = torch.full((S, S), -torch.inf, dtype=x.dtype).triu(1)
        out: Tensor = module(x, x, x, attn_mask=mask, is_causal=True)[0]
        return out

    return function


@pytest.mark.parametrize("made", [self_attention, causal], ids=["unmasked", "causal"])
def test_weights_that_nobody_reads_are_not_computed(made: Callable[[nn.MultiheadAttention], Function]) -> None:
    inputs = [draw((B, S, E))[0].requires_grad_()]
    settled = Settled(made(attention()))
    actual, eager = value_and_gradients(settled.call, inputs), value_and_gradients(made(attention()), inputs)
    assert [d.verdict for d in settled.decisions] == ["taken"]
    check_numbers(actual, eager, value_and_gradients(made(attention().double()), inputs, torch.float64))


def both(x: Tensor) -> tuple[Tensor, Tensor]:
    out: tuple[Tensor, Tensor] = WITH_WEIGHTS(x, x, x)
    return out


def test_options_given_by_their_place_are_left_alone() -> None:
    module = attention()
    weights = (module.in_proj_weight, module.in_proj_bias, None, None, False, 0.0)
    last = (module.out_proj.weight, module.out_proj.bias, True, None, True)

    def function(x: Tensor) -> Tensor:
        out: Tensor = F.multi_head_attention_forward(x, x, x, E, HEADS, *weights, *last)[0]
        return out

    (x,) = draw((S, B, E))
    settled = Settled(function)
    torch.testing.assert_close(settled.call(x), function(x), rtol=0, atol=0)
    assert settled.decisions == []


WITH_WEIGHTS = attention()
NOTHING_SEEN = torch.ones(S, S, dtype=torch.bool).triu(0)


@pytest.mark.parametrize(
    ("function", "device", "reason"),
    [
        (both, "h200", "reads them"),
        (self_attention(attention()), "cpu", "on a CPU"),
        (self_attention(attention(dropout=0.1)), "h200", "dropout"),
        (self_attention(attention(), key_padding_mask=torch.ones(B, S) > 2), "h200", "no key"),
        (self_attention(attention(), attn_mask=NOTHING_SEEN), "h200", "no key"),
    ],
    ids=["read", "cpu", "dropout", "padding", "mask"],
)
def test_weights_that_are_computed(function: Function, device: str, reason: str) -> None:
    (x,) = draw((B, S, E))
    settled = Settled(function, device)
    torch.manual_seed(1)
    actual = settled.call(x)
    torch.manual_seed(1)
    torch.testing.assert_close(actual, function(x), rtol=0, atol=0, equal_nan=True)
    (decision,) = settled.decisions
    assert decision.verdict == "refused" and reason in decision.reason
