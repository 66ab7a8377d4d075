"""Recognises a softmax over scores and an attention sink: one more column whose weight is dropped (gpt-oss).

c = cat([scores, sink], -1)                          [B, H, Nq, Nk + 1]
w = softmax(c - c.max(-1, keepdim=True).values, -1)[..., :-1]
"""

from __future__ import annotations

from torch.fx import Node

from tilewright.graph.canonical import argument, canonical_name, example, is_last, same_shape
from tilewright.passes.attention.spelling import Softmax, less_maximum

BUT_LAST = slice(None, -1, None)


def sink_at(root: Node) -> Softmax | None:
    """The softmax over scores and a sink that ends in `root`; None if `root` is none."""
    source, value = argument(root, 0, "input"), example(root)
    if canonical_name(root) != "softmax" or value is None or not is_last(argument(root, 1, "dim"), value.dim()):
        return None
    inside, result = [root], root
    while isinstance(source, Node) and canonical_name(source) != "cat":
        inside.append(source)
        if (shifted := less_maximum(source)) is not None:
            inside += shifted[1]
        elif canonical_name(source) != "cast":
            return None
        source = argument(source, 0, "input")
    if not isinstance(source, Node) or not is_last(argument(source, 1, "dim"), value.dim()):
        return None
    parts = argument(source, 0, "tensors")
    if not isinstance(parts, (list, tuple)) or len(parts) != 2:
        return None
    scores, sink = parts
    whole, column = example(scores), example(sink)
    if whole is None or column is None or str(column.shape[-1]) != "1" or str(whole.shape[-1]) == "1":
        return None
    while not _leaves_last_out(result):
        if result is not root and canonical_name(result) not in ("cast", "contiguous"):
            return None
        if len(result.users) != 1:
            return None
        result = next(iter(result.users))
        inside.append(result)
    kept = example(result)
    if kept is None or not same_shape(kept.shape, whole.shape):
        return None
    return Softmax(result, scores, (*inside, source), sink)


def _leaves_last_out(node: Node) -> bool:
    """Whether `node` is `weights[..., :-1]`."""
    value, index = example(node), node.args[1] if canonical_name(node) == "getitem" else None
    if value is None or not isinstance(index, tuple) or not index or index[-1] != BUT_LAST:
        return False
    return index[:-1] in ((Ellipsis,), (slice(None),) * (value.dim() - 1))
