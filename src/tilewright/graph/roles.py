"""What each operator does in the model, in the words people draw a Transformer with.

    LN → Q,K,V → heads → QKᵀ/√d → softmax → PV → merge → out-projection → residual
       → LN → FF1 → GELU → FF2 → residual

A role is read off the graph alone: a softmax between two products is attention, its operands' linear
layers are Q, K and V, the one behind it is the out-projection; linear layers around an activation are
FF1 and FF2; a sum of a value with something computed from it is a residual. An operator in no such
place, as those of a backward graph, has its own name as its role.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tilewright.graph import calls
from tilewright.operators.table import row_of

if TYPE_CHECKING:
    from torch.fx import Graph, Node

PRODUCTS = frozenset(["mm", "addmm", "bmm", "baddbmm", "matmul", "linear"])
WEIGHTED = frozenset(["mm", "addmm", "linear"])
ACTIVATIONS = frozenset(["gelu", "relu", "silu"])
COPIES = frozenset(["clone", "_to_copy"])
SCORING = frozenset(["mul", "div", "add", "sub", "where", "masked_fill"])
GRADIENTS = {"linear": "linear backward", "residual": "gradient sum", "add": "gradient sum"}
ATTENTION = ("_scaled_dot_product_", "tilewright.attention")

Passes = Callable[["Node"], bool]


def roles(graph: Graph) -> dict[Node, str]:
    """The role of every operator of a graph, `getitem` included."""
    found: dict[Node, str] = {}
    backward = any(node.op == "placeholder" and node.name.startswith("tangents_") for node in graph.nodes)
    for node in graph.nodes:
        name = _name(node)
        if name == "_softmax":
            _written_out(node, found)
        elif name.startswith(ATTENTION) and not name.endswith("_backward"):
            _fused(node, found)
        elif name in ACTIVATIONS:
            _feed_forward(node, found)
        elif name == "add" and _is_residual(node):
            found[node] = "residual"
    operators = [node for node in graph.nodes if node.op == "call_function"]
    for node in operators:
        if node not in found and not _is_step(node):
            found[node] = _own(node)
        if backward and found.get(node) in GRADIENTS:
            found[node] = GRADIENTS[found[node]]
    for node in operators:
        if node not in found:
            found[node] = _of_neighbour(node, found)
    return found


def _name(node: Node) -> str:
    return calls.operator_name(node.target) if node.op == "call_function" else ""


def _own(node: Node) -> str:
    name = _name(node)
    row = row_of(node.target)
    if row is not None and row.role:
        return row.role if isinstance(row.role, str) else row.role(calls.arguments(node))
    return "linear" if _is_linear(node) else _spelled(name.removeprefix("tilewright."))


def _spelled(name: str) -> str:
    """`cross_entropy_backward` is `cross entropy backward`."""
    return name.strip("_").replace("_", " ")


def _is_layout(node: Node) -> bool:
    return calls.is_view(node) or _name(node) in COPIES


def _is_step(node: Node) -> bool:
    """Whether the node's value is its operand's, in another layout or as one of several results."""
    return _is_layout(node) or node.target is operator.getitem


def _is_linear(node: Node) -> bool:
    """A product with a parameter: one operand is an input of the graph under some view."""
    if _name(node) not in WEIGHTED:
        return False
    return any(_source(operand).op in ("placeholder", "get_attr") for operand in node.all_input_nodes[-2:])


def _source(node: Node) -> Node:
    while calls.is_view(node):
        node = node.all_input_nodes[0]
    return node


def _upstream(node: Node, passes: Passes) -> tuple[list[Node], Node]:
    """From `node` towards first operands as long as `passes`: the nodes passed, the one that stopped it."""
    passed = []
    while passes(node) and node.all_input_nodes:
        passed.append(node)
        node = node.all_input_nodes[0]
    return passed, node


def _downstream(node: Node, passes: Passes) -> Iterable[tuple[list[Node], Node]]:
    """Every way from `node` through users that `passes`, with the user that ends it."""
    for user in node.users:
        if passes(user):
            for passed, end in _downstream(user, passes):
                yield [user, *passed], end
        else:
            yield [], user


def _written_out(softmax: Node, found: dict[Node, str]) -> None:
    """Attention spelled out around a softmax: the product of its scores, the product of its weights."""
    scoring, scores = _upstream(softmax.all_input_nodes[0], lambda n: _is_layout(n) or _name(n) in SCORING)
    if _name(scores) not in PRODUCTS or _is_linear(scores):
        return
    drops = ("native_dropout", "getitem")
    for passed, mixed in _downstream(softmax, lambda n: _is_layout(n) or _name(n) in drops):
        if _name(mixed) not in PRODUCTS or _is_linear(mixed):
            continue
        found[scores] = "QKᵀ/√d"
        found.update(dict.fromkeys(scoring, "QKᵀ/√d"))
        found[softmax] = "softmax"
        found[mixed] = "PV"
        found.update({node: "PV" for node in passed if _is_layout(node)})
        _projections([*scores.all_input_nodes[-2:], mixed.all_input_nodes[-1]], found)
        _merged(mixed, found)


def _fused(attention: Node, found: dict[Node, str]) -> None:
    arguments = calls.arguments(attention)
    found[attention] = "attention"
    names = ("query", "key", "value") if "query" in arguments else ("q", "k", "v")
    operands = [arguments[name] for name in names]
    _projections([node for node in operands if isinstance(node, type(attention))], found)
    _merged(attention, found)


def _projections(operands: list[Node], found: dict[Node, str]) -> None:
    """Name the linear layers that make the queries, keys and values, and the layout between."""
    for role, operand in zip("QKV", operands, strict=False):
        passed, linear = _upstream(operand, lambda n: _is_layout(n) or _name(n) in ("mul", "div"))
        if _is_linear(linear):
            # One linear layer may make all three.
            found[linear] = role if linear not in found else f"{found[linear]},{role}"
            found.update({node: "heads" for node in passed if not _is_inside(node, linear)})


def _is_inside(view: Node, linear: Node) -> bool:
    """Whether this view is the linear layer's own: it only folds leading axes into one, or back."""
    before, after = calls.output(view.all_input_nodes[0]), calls.output(view)
    beside = view.all_input_nodes[0] is linear or linear in view.users
    return beside and before is not None and after is not None and before.shape[-1] == after.shape[-1]


def _merged(attention: Node, found: dict[Node, str]) -> None:
    for passed, end in _downstream(attention, _is_step):
        if _is_linear(end):
            found[end] = "out-projection"
            found.update({node: "merge" for node in passed if _is_layout(node) and not _is_inside(node, end)})


def _feed_forward(activation: Node, found: dict[Node, str]) -> None:
    _, before = _upstream(activation.all_input_nodes[0], _is_layout)
    ways = _downstream(activation, lambda node: _is_step(node) or _name(node) == "native_dropout")
    behind = [end for _, end in ways if _is_linear(end)]
    if not _is_linear(before) or len(behind) != 1:
        return
    for linear, role in ((before, "FF1"), (behind[0], "FF2")):
        # A layer between two activations is neither.
        found[linear] = role if linear not in found else "linear"


def _is_residual(add: Node) -> bool:
    """Whether one summand was computed from the other."""
    summands = add.all_input_nodes
    shapes = {tuple(t.shape) for node in (add, *summands) if (t := calls.output(node)) is not None}
    if len(summands) != 2 or len(shapes) != 1:
        return False
    return any(_computed_from(a, b) for a, b in (summands, reversed(summands)))


def _computed_from(node: Node, ancestor: Node) -> bool:
    seen, todo = {node}, [node]
    while todo:
        for operand in todo.pop().all_input_nodes:
            if operand is ancestor:
                return True
            if operand not in seen and operand.op == "call_function":
                seen.add(operand)
                todo.append(operand)
    return False


def _of_neighbour(node: Node, found: dict[Node, str]) -> str:
    """A layout operator belongs to the product that it follows, else that it leads to, else to a neighbour.

    A `getitem` belongs to the operator whose result it takes.
    """
    made_from = node.all_input_nodes[0] if node.all_input_nodes else None
    if made_from in found and (node.target is operator.getitem or _name(made_from) in PRODUCTS):
        return found[made_from]
    products = (found[end] for _, end in _downstream(node, _is_layout) if _name(end) in PRODUCTS)
    beside = (found[neighbour] for neighbour in (made_from, *node.users) if neighbour in found)
    return next(products, None) or next(beside, None) or _own(node)
