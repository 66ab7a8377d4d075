"""The role of each operator in the model, in the terms of Transformer diagrams.

    LN → Q,K,V → heads → QKᵀ/√d → softmax → PV → merge → out-projection → residual
       → LN → FF1 → GELU → FF2 → residual

Roles follow from the graph alone: a softmax between two products is attention, the linear layers of its
operands are Q, K and V, the linear layer after it is the out-projection; linear layers around an activation
are FF1 and FF2; a sum of a value and a value computed from it is a residual. The role of any other operator,
such as those of a backward graph, is its name.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from tilewright.graph import calls
from tilewright.operators.table import row_of

if TYPE_CHECKING:
    from torch.fx import Graph, Node

    from tilewright.operators.row import Row

GRADIENTS = {"linear": "linear backward", "residual": "gradient sum", "add": "gradient sum"}

Passes = Callable[["Node"], bool]


def roles(graph: Graph) -> dict[Node, str]:
    """The role of every operator of a graph, `getitem` included."""
    found: dict[Node, str] = {}
    backward = any(node.op == "placeholder" and node.name.startswith("tangents_") for node in graph.nodes)
    for node in graph.nodes:
        row = _row(node)
        if row is None:
            continue
        if row.role == "softmax":
            _unfused_attention(node, found)
        elif row.role == "attention":
            _fused_attention(node, found)
        elif row.part == "activation":
            _feed_forward(node, found)
        elif row.part == "sum" and _is_residual(node):
            found[node] = "residual"
    operators = [node for node in graph.nodes if node.op == "call_function"]
    for node in operators:
        if node not in found and not _is_step(node):
            found[node] = _operator_role(node)
        if backward and found.get(node) in GRADIENTS:
            found[node] = GRADIENTS[found[node]]
    for node in operators:
        if node not in found:
            found[node] = _neighbour_role(node, found)
    return found


def _row(node: Node) -> Row | None:
    return row_of(node.target) if node.op == "call_function" else None


def _is_pointwise(node: Node) -> bool:
    return calls.class_of(node) == "pointwise"


def _is_product(node: Node) -> bool:
    """Whether the node is a product of matrices; other compute has a role of its own."""
    row = _row(node)
    return row is not None and row.operator_class == "compute" and not row.role


def _operator_role(node: Node) -> str:
    row = row_of(node.target)
    if row is not None and row.role:
        return row.role if isinstance(row.role, str) else row.role(calls.arguments(node))
    name = calls.operator_name(node.target).removeprefix("tilewright.")
    return "linear" if _is_linear(node) else name.strip("_").replace("_", " ")


def _is_layout(node: Node) -> bool:
    row = _row(node)
    return calls.is_view(node) or (row is not None and row.part == "copy")


def _is_step(node: Node) -> bool:
    """Whether the node only changes its operand's layout or selects one of several results."""
    return _is_layout(node) or node.target is operator.getitem


def _is_dropout(node: Node) -> bool:
    return calls.class_of(node) == "random"


def _is_linear(node: Node) -> bool:
    """Whether the node is a product with a parameter: a matrix that is a graph input or a view of one."""
    if not _is_product(node):
        return False
    matrices = [x for x in node.all_input_nodes[-2:] if (value := calls.output(x)) is not None and value.dim() == 2]
    return any(calls.through(operand, calls.is_view).op in ("placeholder", "get_attr") for operand in matrices)


def _upstream(node: Node, passes: Passes) -> tuple[list[Node], Node]:
    """Follow first operands from `node` while `passes`: the nodes passed, and the first that does not pass."""
    passed = []
    while passes(node) and node.all_input_nodes:
        passed.append(node)
        node = node.all_input_nodes[0]
    return passed, node


def _downstream(node: Node, passes: Passes) -> Iterable[tuple[list[Node], Node]]:
    """Every path from `node` through users that pass, with the first user that does not."""
    for user in node.users:
        if passes(user):
            for passed, end in _downstream(user, passes):
                yield [user, *passed], end
        else:
            yield [], user


def _unfused_attention(softmax: Node, found: dict[Node, str]) -> None:
    """Name the operators of unfused attention around a softmax: the products of the scores and of the weights."""
    scoring, scores = _upstream(softmax.all_input_nodes[0], lambda n: _is_layout(n) or _is_pointwise(n))
    if not _is_product(scores) or _is_linear(scores):
        return
    for passed, mixed in _downstream(softmax, lambda n: _is_step(n) or _is_dropout(n)):
        if not _is_product(mixed) or _is_linear(mixed):
            continue
        found[scores] = "QKᵀ/√d"
        found.update(dict.fromkeys(scoring, "QKᵀ/√d"))
        found[softmax] = "softmax"
        found[mixed] = "PV"
        found.update({node: "PV" for node in passed if _is_layout(node)})
        _projections([*scores.all_input_nodes[-2:], mixed.all_input_nodes[-1]], found)
        _merged(mixed, found)


def _fused_attention(attention: Node, found: dict[Node, str]) -> None:
    arguments = calls.arguments(attention)
    found[attention] = "attention"
    names = ("query", "key", "value") if "query" in arguments else ("q", "k", "v")
    operands = [arguments[name] for name in names if name in arguments]
    _projections([node for node in operands if isinstance(node, type(attention))], found)
    _merged(attention, found)


def _projections(operands: list[Node], found: dict[Node, str]) -> None:
    """Name the linear layers that compute queries, keys and values, and the layout operators in between."""
    for role, operand in zip("QKV", operands, strict=False):
        passed, linear = _upstream(operand, lambda n: _is_layout(n) or _is_pointwise(n))
        if _is_linear(linear):
            # One linear layer may compute all three.
            found[linear] = role if linear not in found else f"{found[linear]},{role}"
            found.update({node: "heads" for node in passed if not _is_inside(node, linear)})


def _is_inside(view: Node, linear: Node) -> bool:
    """Whether this view belongs to the linear layer: it only flattens leading axes, or restores them."""
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
    paths = _downstream(activation, lambda node: _is_step(node) or _is_dropout(node))
    behind = [end for _, end in paths if _is_linear(end)]
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
    behind = calls.closure([node], lambda x: x.all_input_nodes if x.op == "call_function" else [])
    return ancestor in behind - {node}


def _neighbour_role(node: Node, found: dict[Node, str]) -> str:
    """A layout operator has the role of the product before it, else of the product after it, else of a neighbour.

    A `getitem` has the role of its operand.
    """
    made_from = node.all_input_nodes[0] if node.all_input_nodes else None
    if made_from in found and (node.target is operator.getitem or _is_product(made_from)):
        return found[made_from]
    products = (found[end] for _, end in _downstream(node, _is_layout) if _is_product(end))
    beside = (found[neighbour] for neighbour in (made_from, *node.users) if neighbour in found)
    return next(products, None) or next(beside, None) or _operator_role(node)
