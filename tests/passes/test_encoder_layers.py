"""PyTorch's transformer layer for inference, written out as for a GPU."""

import itertools
from collections.abc import Callable, Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from tests.gpu.kernels.launching import in_turn
from tests.passes.attention.test_recognise import check_numbers
from tilewright.compile.stages import TORCH_LEVEL
from tilewright.hardware.target import target_named

B, S, E, HEADS = 3, 7, 32, 4
PADDING = torch.arange(S) >= torch.tensor([[S], [5], [0]])
"""The last sequence has no key: its results are NaN."""
CAUSAL = torch.full((S, S), -torch.inf).triu(1)


MASKS: dict[str, dict[str, Tensor]] = {
    "unmasked": {}, "padding": {"src_key_padding_mask": PADDING}, "causal": {"src_mask": CAUSAL},
    "both": {"src_mask": CAUSAL < 0, "src_key_padding_mask": PADDING},
}  # fmt: skip


@pytest.mark.parametrize(
    ("masked", "norm_first", "activation"), in_turn(itertools.product(MASKS, (False, True)), [("relu", "gelu")])
)
def test_a_layer_is_written_out(masked: str, norm_first: bool, activation: str) -> None:
    masks = MASKS[masked]
    torch._dynamo.reset()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(E, HEADS, 64, activation=activation, batch_first=True, norm_first=norm_first)
    layer, x = layer.eval().requires_grad_(False), torch.randn(B, S, E)
    verdicts: list[tuple[str, str]] = []

    def backend(gm: GraphModule, _: Sequence[Tensor]) -> Callable[..., Any]:
        verdicts.extend((d.passed_by, d.verdict) for d in TORCH_LEVEL.run(gm.graph, target_named("h200")))
        gm.recompile()
        return gm

    actual = torch.compile(layer, backend=backend, fullgraph=True)(x, **masks)
    assert verdicts[0] == ("encoder_layers", "taken")
    assert verdicts[1] == ("attention", "taken")
    eager = layer(x, **masks)
    # On a GPU the call has the approximate GELU. A function of the user's own is not for PyTorch's call.
    exact = deepcopy(layer).double()
    exact.activation, exact.activation_relu_or_gelu = getattr(F, activation), 0
    if activation == "gelu":
        exact.activation = nn.GELU("tanh")
    wide = {name: mask.double() if mask.is_floating_point() else mask for name, mask in masks.items()}
    reference = exact(x.double(), **wide)
    rows = slice(0, 2 if "src_key_padding_mask" in masks else B)
    assert torch.equal(actual.isnan(), eager.isnan())
    check_numbers([actual[rows]], [reference[rows].float() if activation == "gelu" else eager[rows]], [reference[rows]])
