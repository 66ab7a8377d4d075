"""Replaces in-place operators on attention scores by functional ones, if no other node can see the write.

s = q @ k.mT                                 s = q @ k.mT
s *= scale                                   a = s * scale
s.masked_fill_(mask, -inf)                   b = a.masked_fill(mask, -inf)
w = softmax(s, -1)                       →   w = softmax(b, -1)
"""

from __future__ import annotations

import operator
from collections.abc import Callable

from torch.fx import Graph, Node

from tilewright.graph.canonical import canonical_name, example, memory_of, same_shape
from tilewright.passes.attention.match import product_above, product_below
from tilewright.passes.attention.spelling import tensor_of
from tilewright.passes.attention.writer import Writer

FUNCTIONS: dict[str, Callable[..., object]] = {
    "iadd": operator.add, "isub": operator.sub, "imul": operator.mul, "itruediv": operator.truediv,
}  # fmt: skip
METHODS = frozenset({"add_", "sub_", "mul_", "div_", "masked_fill_", "tanh_"})


def write_scores_apart(graph: Graph) -> None:
    """Rewrite `graph`, a torch-level graph from Dynamo, in place: in-place calls between two matrix products."""
    nodes = list(graph.nodes)
    if any(canonical_name(node) == "_enter_inference_mode" for node in nodes):
        return
    places = {node: place for place, node in enumerate(nodes)}
    enabled = True
    for node in nodes:
        if canonical_name(node) == "_set_grad_enabled":
            enabled = node.args[0] is True
        written = node.args[0] if node.args and canonical_name(node) in (*FUNCTIONS, *METHODS) else None
        # With gradients off, a written tensor still requires its gradient, but a new tensor would not.
        value = example(written)
        if not isinstance(written, Node) or value is None or (value.requires_grad and not enabled):
            continue
        if _is_between_products(node, written) and _is_seen_alone(node, written, places):
            _write_apart(node, written, places)


def _is_between_products(node: Node, written: Node) -> bool:
    return product_above(node) is not None and product_below(node if node.users else written) is not None


def _is_seen_alone(node: Node, written: Node, places: dict[Node, int]) -> bool:
    """Whether later calls read the memory that `node` writes only through `written` or the result of `node`."""
    here, memory = places[node], memory_of(written)
    aliases = [x for x in places if places[x] < here and memory_of(x) == memory]
    if not all(x.op in ("call_function", "call_method") for x in aliases):
        return False
    return all(places[user] <= here for x in aliases if x is not written for user in x.users)


def _write_apart(node: Node, written: Node, places: dict[Node, int]) -> None:
    write, name = Writer(node.graph, node), str(canonical_name(node))
    if name in FUNCTIONS:
        new = write.call(FUNCTIONS[name], *node.args, **node.kwargs)
    else:
        new = write.method(name.removesuffix("_"), *node.args, **node.kwargs)
    before, after = tensor_of(written), tensor_of(new)
    alike = same_shape(before.shape, after.shape) and same_shape(before.stride(), after.stride())
    if not alike or before.dtype != after.dtype:
        node.graph.erase_node(new)
        return
    places[new] = here = places.pop(node)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    for user in list(written.users):
        if places[user] > here:
            user.replace_input_with(written, new)
