"""A term that is added to all keys of an attention alike has no gradient.

    k = linear(x, W, b)                 →   b' = detach(b) + (b - b)
                                            k = linear(x, W, b')

q·(k + b) = q·k + q·b, and q·b is one number for all keys of a query: softmax does not see it. So the
gradient of b, which is that of k summed over the keys, is zero. Computed, it is the sum of rounding errors in the
rows of dS, different in every implementation. In the form above b receives its gradient once with each sign: exactly
zero, and NaN where it is NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

from tilewright.passes.attention.spelling import argument, example, mutates, same_shape, spelled, tensor_of
from tilewright.passes.attention.writer import Writer

VIEWS = frozenset({"view", "transpose", "permute", "unsqueeze", "squeeze", "t"})
EQUAL = frozenset({"contiguous", "cast"})
"""Calls that move values to another memory or dtype and nowhere else."""
ATTENTION = frozenset({"scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu.default"})


def settle_shifts(gm: GraphModule) -> int:
    """Rewrite `gm`, a torch-level graph from Dynamo, in place; gives how many terms were found."""
    keys = [argument(node, 1, "key") for node in gm.graph.nodes if _is_attention(node)]
    found = [shift for key in keys if isinstance(key, Node) for shift in _shifts(key, [])]
    for reader, term in found:
        write = Writer(gm.graph, reader)
        nothing = write.call(torch.sub, term, term)
        reader.replace_input_with(term, write.call(torch.add, write.method("detach", term), nothing))
    if found:
        gm.recompile()
    return len(found)


def _is_attention(node: Node) -> bool:
    return node.op == "call_function" and getattr(node.target, "__name__", "") in ATTENTION


def _shifts(node: Node, below: list[Node]) -> Iterator[tuple[Node, Node]]:
    """The calls that add a term to all keys alike, each with the term, from `node` upwards.

    `node` is the keys, seen through the calls `below`, from the nearest on.
    """
    name, value = spelled(node), example(node)
    if value is None or not value.requires_grad or not _is_read_once(node) or mutates(node):
        return
    if name in VIEWS or name in EQUAL:
        if isinstance(node.args[0], Node):
            yield from _shifts(node.args[0], [node, *below])
        return
    terms = [argument(node, 2, "bias")] if name == "linear" else node.args if name == "add" and not node.kwargs else ()
    for term in terms:
        if not isinstance(term, Node) or node.args.count(term) > 1:
            continue
        if _is_shift(term, node, below):
            yield node, term
        elif name == "add" and same_shape(tensor_of(term).shape, value.shape):
            yield from _shifts(term, below)


def _is_read_once(node: Node) -> bool:
    """Whether `node` receives its gradient from one operand of one call."""
    readers = [user for user in node.users if spelled(user) != "detach"]
    return len(readers) == 1 and readers[0].args.count(node) == 1


def _is_shift(term: Node, node: Node, below: list[Node]) -> bool:
    """Whether `term`, broadcast to `node` and seen through the views `below`, does not move along the keys.

    A tensor that is expanded has strides of zero where it repeats, and views keep them.
    """
    value = tensor_of(term)
    if not value.requires_grad:
        return False
    write = Writer(node.graph, node)
    with write.mode:
        seen = torch.empty(value.shape).expand(tensor_of(node).shape)
    for view in below:
        if spelled(view) in VIEWS:
            source = view.args[0]
            assert isinstance(source, Node)
            try:
                seen = write.run(view, {source: seen})
            except RuntimeError:
                return False
    return str(seen.stride(-2)) == "0"
