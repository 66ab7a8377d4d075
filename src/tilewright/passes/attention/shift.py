"""Gives a term that is added to all keys of an attention alike its exact gradient, zero.

    k = linear(x, W, b)                 →   b' = detach(b) + (b - b)
                                            k = linear(x, W, b')

q·(k + b) = q·k + q·b, and q·b is the same for all keys of a query, so softmax does not depend on it and the gradient of
b is zero. Computed as the sum of k's gradient over the keys, it would be the sum of rounding errors in the rows of dS,
different in every implementation. In the form above b receives the gradient once with each sign: exactly zero, or NaN.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from tilewright.graph.canonical import argument, canonical_name, example, mutates, same_shape, tensor_of
from tilewright.graph.insert import REFUSED_VIEW, Writer
from tilewright.hardware.target import Target

VIEWS = frozenset({"view", "transpose", "permute", "unsqueeze", "squeeze", "t"})
EQUAL = frozenset({"contiguous", "cast"})
"""Calls that change only the layout or the dtype."""
ATTENTION = frozenset({"scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu.default"})


def zero_shift_gradients(graph: Graph, target: Target) -> None:
    """Rewrite `graph`, a torch-level graph from Dynamo, in place."""
    functions = [node for node in graph.nodes if node.op == "call_function"]
    keys = [argument(call, 1, "key") for call in functions if getattr(call.target, "__name__", "") in ATTENTION]
    found = [shift for key in keys if isinstance(key, Node) for shift in _shifts(key, [])]
    for reader, term in found:
        write = Writer(graph, reader)
        nothing = write.call(torch.sub, term, term)
        reader.replace_input_with(term, write.call(torch.add, write.method("detach", term), nothing))


def _shifts(node: Node, below: list[Node]) -> Iterator[tuple[Node, Node]]:
    """The calls from `node` upwards that add a term to all keys alike, each with the term.

    The calls `below`, nearest first, lead from `node` to the keys.
    """
    name, value = canonical_name(node), example(node)
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
    """Whether `node` receives its gradient through one operand of one call."""
    readers = [user for user in node.users if canonical_name(user) != "detach"]
    return len(readers) == 1 and readers[0].args.count(node) == 1


def _is_shift(term: Node, node: Node, below: list[Node]) -> bool:
    """Whether `term`, broadcast to `node` and viewed by `below`, is the same for all keys.

    An expanded tensor has stride 0 along the axes on which it repeats, and views keep the strides.
    """
    value = tensor_of(term)
    if not value.requires_grad:
        return False
    write = Writer(node.graph, node)
    with write.mode:
        seen = torch.empty(value.shape).expand(tensor_of(node).shape)
    for view in below:
        if canonical_name(view) in VIEWS:
            source = view.args[0]
            assert isinstance(source, Node)
            try:
                seen = write.run(view, {source: seen})
            except REFUSED_VIEW:
                return False
    return str(seen.stride(-2)) == "0"
