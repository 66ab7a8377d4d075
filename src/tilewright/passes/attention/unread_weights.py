"""Lets `nn.MultiheadAttention` on a GPU compute no weights if the program does not read them.

    y, _ = mha(x, x, x)                  products, a softmax, and the mean of its weights [B, Sq, Sk]
    →   y, _ = mha(x, x, x, need_weights=False)                                  fused attention

The module returns weights by default, which rules out PyTorch's fused kernels. A call with dropout stays, since fused
kernels draw other masks. So does a call in which a query may have no key: unfused it gives NaN, fused zeros.
"""

from __future__ import annotations

from torch.fx import Node

from tilewright.graph.canonical import argument, canonical_name, example
from tilewright.hardware.target import Target
from tilewright.passes.attention.constants import Constants
from tilewright.passes.attention.mask_parts import read_mask
from tilewright.passes.attention.spelling import tensor_of
from tilewright.passes.rule import Refusal, call, rule

DROPOUT = 10
"""Position of the dropout probability."""
BY_NAME = 13
"""Positional arguments of PyTorch's modules; the others (training, masks, need_weights) are given by name."""


@rule(
    call("multi_head_attention_forward", ...),
    where=lambda node: len(node.args) <= BY_NAME and node.kwargs.get("need_weights", True),
    reason="weights that nobody reads are not computed",
    refused="its weights are computed: ",
    by="attention",
)
def leave_weights_out(node: Node, target: Target) -> Node:
    if not target.runs_on_gpu(tensor_of(argument(node, 0, "query")).device):
        raise Refusal("PyTorch's fused attention on a CPU gives zeros where they are NaN")
    if any(canonical_name(user) != "getitem" or (user.args[1] != 0 and user.users) for user in node.users):
        raise Refusal("the program reads them")
    if argument(node, DROPOUT, "dropout_p", 0.0) != 0.0 and node.kwargs.get("training", True):
        raise Refusal("dropout, whose mask must be the one that eager draws")
    mask = node.kwargs.get("attn_mask")
    leaves_keys = mask is None or (isinstance(mask, Node) and _leaves_keys(mask, Constants(node.graph)))
    if node.kwargs.get("key_padding_mask") is not None or not leaves_keys:
        raise Refusal("a mask that may leave a query no key, which gives NaN")
    node.update_kwarg("need_weights", False)
    # With weights the flag is a hint beside the mask; without weights it would replace the mask.
    node.update_kwarg("is_causal", False)
    return node


def _leaves_keys(mask: Node, constants: Constants) -> bool:
    """Whether a mask [Sq, Sk] or [B·H, Sq, Sk] leaves every query a key."""
    value = example(mask)
    if value is None or value.dim() < 2:
        return False
    found = read_mask(mask, constants, *value.shape[-2:])
    return not found.conditions and not found.biases and found.leaves_a_key(*value.shape[-2:])
