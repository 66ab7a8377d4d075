"""Lets `nn.MultiheadAttention` on a GPU compute no weights if the program does not read them.

    y, _ = mha(x, x, x)                  products, a softmax, and the mean of its weights [B, Sq, Sk]
    →   y, _ = mha(x, x, x, need_weights=False)                                  fused attention

The module returns weights by default, which rules out PyTorch's fused kernels. A call with dropout stays, since fused
kernels draw other masks. So does a call in which a query may have no key: unfused it gives NaN, fused zeros.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from tilewright.graph.canonical import argument, canonical_name, example
from tilewright.graph.source import source_line
from tilewright.hardware.target import Target
from tilewright.passes.attention.constants import Constants
from tilewright.passes.attention.mask_parts import read_mask
from tilewright.records.program import Decision, Verdict

CALL = "multi_head_attention_forward"
DROPOUT = 10
"""Position of the dropout probability."""
BY_NAME = 13
"""Positional arguments of PyTorch's modules; the others (training, masks, need_weights) are given by name."""


def leave_weights_out(graph: Graph, target: Target) -> list[Decision]:
    """Rewrite `graph`, a torch-level graph from Dynamo, in place; a decision for each call that asks for weights."""
    found = (node for node in graph.nodes if canonical_name(node) == CALL and len(node.args) <= BY_NAME)
    calls = [node for node in found if node.kwargs.get("need_weights", True)]
    constants = Constants(graph) if calls else None
    return [_decide(node, constants, target) for node in calls if constants is not None]


def _decide(node: Node, constants: Constants, target: Target) -> Decision:
    why = _refusal(node, constants, target)
    if why is None:
        node.update_kwarg("need_weights", False)
        # With weights the flag is a hint beside the mask; without weights it would replace the mask.
        node.update_kwarg("is_causal", False)
    reason = "weights that nobody reads are not computed" if why is None else f"its weights are computed: {why}"
    verdict: Verdict = "taken" if why is None else "refused"
    producer = node.all_input_nodes[0].name
    return Decision("forward", producer, node.name, verdict, reason, source=source_line(node), passed_by="attention")


def _refusal(node: Node, constants: Constants, target: Target) -> str | None:
    query = example(argument(node, 0, "query"))
    if query is None or not target.runs_on_gpu(query.device):
        return "PyTorch's fused attention on a CPU gives zeros where they are NaN"
    if any(canonical_name(user) != "getitem" or (user.args[1] != 0 and user.users) for user in node.users):
        return "the program reads them"
    if argument(node, DROPOUT, "dropout_p", 0.0) != 0.0 and node.kwargs.get("training", True):
        return "dropout, whose mask must be the one that eager draws"
    mask = node.kwargs.get("attn_mask")
    leaves_keys = mask is None or (isinstance(mask, Node) and _leaves_keys(mask, constants))
    if node.kwargs.get("key_padding_mask") is not None or not leaves_keys:
        return "a mask that may leave a query no key, which gives NaN"
    return None


def _leaves_keys(mask: Node, constants: Constants) -> bool:
    """Whether a mask [Sq, Sk] or [B·H, Sq, Sk] leaves every query a key."""
    value = example(mask)
    if value is None or value.dim() < 2:
        return False
    found = read_mask(mask, constants, *value.shape[-2:])
    return not found.conditions and not found.biases and found.leaves_a_key(*value.shape[-2:])
