"""Reads the many ways of writing attention's products and softmax.

Dynamo records what the user wrote: `q @ k.mT`, `torch.bmm(q, k.transpose(1, 2))` and
`torch.einsum("bqd,bkd->bqk", q, k)` are three different nodes. `scores_at` and `weighted_at` read a matrix product,
`softmax_at` a softmax, one call or written out, also one over scores and a sink (gpt-oss):

    c = cat([scores, sink], -1)                          [B, H, Nq, Nk + 1]
    w = softmax(c - c.max(-1, keepdim=True).values, -1)[..., :-1]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.fx import Node

from tilewright.graph.canonical import argument, canonical_name, example, is_last, same_shape, static, tensor_of
from tilewright.records.errors import Refusal

PRODUCTS = frozenset({"matmul", "einsum", "baddbmm", "addmm"})

Scalar = Callable[[object], float | None]
"""Returns the number that an argument holds; None if it is not constant."""


@dataclass(frozen=True)
class Operand:
    """An operand of a matrix product: a node, and the order of its axes that makes it [*batch, rows, columns]."""

    node: Node
    order: tuple[int, ...] | None = None
    """None: unchanged. -1 stands for a batch axis that the node does not have."""


@dataclass(frozen=True)
class Scores:
    """`alpha · q kᵀ + beta · added`: q [..., Nq, d]; k [..., Nk, d], or [..., d, Nk] if `k_transposed`."""

    q: Operand
    k: Operand
    k_transposed: bool
    alpha: float = 1.0
    added: Node | None = None
    beta: float = 1.0


@dataclass(frozen=True)
class Weighted:
    """`weights v` with v [..., Nk, dv]; `order` permutes [*batch, Nq, dv] into the node's own axes."""

    v: Operand
    order: tuple[int, ...] | None = None


def _pair(node: Node) -> tuple[Node, Node]:
    """The two factors of a product."""
    first = 1 if canonical_name(node) in ("baddbmm", "addmm") else 0
    names = (("batch1", "batch2"), ("mat1", "mat2"))[canonical_name(node) == "addmm"]
    a = argument(node, first, names[0], node.kwargs.get("input"))
    b = argument(node, first + 1, names[1], node.kwargs.get("other", node.kwargs.get("mat2")))
    if not isinstance(a, Node) or not isinstance(b, Node):
        raise Refusal(f"the operands of {node.name} are not plain tensors")
    return a, b


def _letters(node: Node) -> tuple[list[str], list[Node], str]:
    """The subscripts of a two-operand einsum, its operands and its output's subscript."""
    equation, operands = node.args[0], node.args[1:]
    if len(operands) == 1 and isinstance(operands[0], (list, tuple)):
        operands = tuple(operands[0])
    text = str(equation).replace(" ", "")
    inputs, arrow, out = text.partition("->")
    subscripts = inputs.split(",")
    plain = arrow and "." not in text and all(len(set(s)) == len(s) for s in (*subscripts, out))
    if not plain or len(subscripts) != 2 or not all(isinstance(x, Node) for x in operands):
        raise Refusal(f"einsum {equation!r} is not a plain batched product")
    return subscripts, [x for x in operands if isinstance(x, Node)], out


def _order(letters: str, wanted: str, batch: str = "") -> tuple[int, ...] | None:
    """The order of axes that makes `wanted` of `letters`, which may lack letters of `batch`."""
    if not set(letters) <= set(wanted) or not set(wanted) <= set(letters + batch):
        raise Refusal(f"einsum operand {letters!r} is no batched matrix")
    return None if letters == wanted else tuple(letters.find(x) for x in wanted)


def scores_at(node: Node) -> Scores:
    """The product at `node` read as attention scores, [..., Nq, Nk]."""
    if canonical_name(node) == "einsum":
        (left, right), (a, b), out = _letters(node)
        if out[-1] in left:
            left, right, a, b = right, left, b, a
        batch, row, column = out[:-2], out[-2:-1], out[-1:]
        shared = "".join(x for x in left if x in right and x not in out)
        if len(shared) != 1:
            raise Refusal("einsum sums over more than one axis")
        q = Operand(a, _order(left, batch + row + shared, batch))
        return Scores(q, Operand(b, _order(right, batch + column + shared, batch)), k_transposed=False)
    a, b = _pair(node)
    if tensor_of(a).dim() < 2 or tensor_of(b).dim() < 2:
        raise Refusal(f"{node.name} is a product with a vector")
    if canonical_name(node) == "matmul":
        return Scores(Operand(a), Operand(b), k_transposed=True)
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    added = argument(node, 0, "input")
    if not isinstance(alpha, (int, float)) or not isinstance(beta, (int, float)):
        raise Refusal(f"alpha or beta of {node.name} is no number")
    # With beta = 0 the product does not read the added tensor, not even NaN.
    return Scores(Operand(a), Operand(b), True, alpha, added if beta != 0 else None, beta)


def weighted_at(node: Node, weights: Node) -> Weighted:
    """The product at `node` read as attention weights times values."""
    if canonical_name(node) == "einsum":
        (left, right), (a, b), out = _letters(node)
        if b is weights:
            left, right, a, b = right, left, b, a
        if a is not weights or len(left) < 2:
            raise Refusal("the weights are not an operand of einsum")
        batch, row, column = left[:-2], left[-2:-1], left[-1:]
        depth = "".join(x for x in right if x not in left)
        if column in out or len(depth) != 1:
            raise Refusal("einsum does not sum over the keys")
        order = _order(batch + row + depth, out)
        return Weighted(Operand(b, _order(right, batch + column + depth, batch)), order)
    a, b = _pair(node)
    if a is not weights or b is weights:
        raise Refusal("the weights are not the left operand of the second product")
    if tensor_of(b).dim() < 2:
        raise Refusal(f"{node.name} is a product with a vector")
    if canonical_name(node) != "matmul" and (node.kwargs.get("beta", 1) != 0 or node.kwargs.get("alpha", 1) != 1):
        raise Refusal(f"{node.name} adds to the product")
    return Weighted(Operand(b))


def scaled_by(node: Node, scalar: Scalar) -> tuple[object, float] | None:
    """x and f where `node` is f · x, also written x · f or x / (1 / f)."""
    a, b = argument(node, 0, "input"), argument(node, 1, "other")
    if canonical_name(node) == "div" and node.kwargs.get("rounding_mode") is None:
        number = scalar(b)
        return (a, 1 / number) if number else None
    if canonical_name(node) == "mul":
        for x, other in ((a, b), (b, a)):
            if (number := scalar(other)) is not None:
                return x, number
    return None


def row_statistic(node: object, kind: str) -> tuple[Node, list[Node]] | None:
    """`x.amax(-1, keepdim=True)` and its spellings: x [..., M], and the nodes from it to [..., 1].

    `kind` is "max", "sum" or "logsumexp".
    """
    value = example(node)
    if not isinstance(node, Node) or value is None or value.dim() == 0 or str(value.shape[-1]) != "1":
        return None
    rank, inside = value.dim(), list[Node]()
    while True:
        inside.append(node)
        name, source = canonical_name(node), node.args[0] if node.args else None
        if not isinstance(source, Node):
            return None
        if name == kind or (kind == "max" and name == "amax"):
            whole = example(source)
            dim = argument(node, 1, "dim")
            if whole is not None and whole.dim() == rank and is_last(dim, rank):
                return source, inside
            return None
        adds_axis = name == "unsqueeze" and argument(node, 1, "dim") in (-1, rank - 1)
        if name in ("getitem", "getattr") and len(node.args) == 2:
            index = node.args[1]
            adds_axis = index == (Ellipsis, None) or index == (*[slice(None)] * (rank - 1), None)
            adds_axis = adds_axis or (canonical_name(source) == "max" and index in (0, "values"))
        # The gradient through the maximum cancels, so `detach` changes nothing.
        if not adds_axis and not (name == "detach" and kind == "max"):
            return None
        node = source


def less_maximum(node: Node) -> tuple[Node, list[Node]] | None:
    """x of `x - max(x, -1, keepdim=True)`, whose softmax is that of x, and the nodes of the maximum."""
    top = row_statistic(argument(node, 1, "other"), "max") if canonical_name(node) == "sub" else None
    return top if top is not None and top[0] is node.args[0] else None


def normalised(node: Node) -> tuple[Node, list[Node]] | None:
    """exp of `exp / sum(exp, -1, keepdim=True)`, and the nodes of the sum."""
    exp = argument(node, 0, "input")
    if canonical_name(node) != "div" or not isinstance(exp, Node) or canonical_name(exp) != "exp":
        return None
    total = row_statistic(argument(node, 1, "other"), "sum")
    return total if total is not None and total[0] is exp else None


@dataclass(frozen=True)
class Softmax:
    """A softmax over the last axis: its result, its input, and the nodes that compute it."""

    result: Node
    source: Node
    inside: tuple[Node, ...]
    sink: Node | None = None
    """[*lead, Nq, 1]: one more score of each row (an attention sink); `result` is without its weight."""


def softmax_at(node: Node) -> Softmax:
    """The softmax with the result `node`, one call or written out."""
    name = canonical_name(node)
    source = argument(node, 0, "input")
    if name == "softmax" and isinstance(source, Node):
        if not is_last(argument(node, 1, "dim"), tensor_of(source).dim()):
            raise Refusal("the softmax does not run over the last axis")
        return Softmax(node, source, (node,))
    if name == "exp" and isinstance(source, Node):
        if canonical_name(source) == "log_softmax" and isinstance(source.args[0], Node):
            if not is_last(argument(source, 1, "dim"), tensor_of(source).dim()):
                raise Refusal("the softmax does not run over the last axis")
            return Softmax(node, source.args[0], (node, source))
        if canonical_name(source) == "sub":
            total = row_statistic(source.args[1], "logsumexp")
            if total is not None and total[0] is source.args[0]:
                return Softmax(node, total[0], (node, source, *total[1]))
    if (total := normalised(node)) is not None:
        exp, sums = total
        shifted = exp.args[0]
        top = less_maximum(shifted) if isinstance(shifted, Node) else None
        if top is None:
            raise Refusal("exp without the row maximum subtracted: eager overflows, the fused form does not")
        return Softmax(node, top[0], (node, *sums, exp, *exp.all_input_nodes, *top[1]))
    raise Refusal("exp between two products that is not normalised as a softmax over the last axis")


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


def unrepeated(node: Node) -> Node:
    """x [B, H, S, D] of a tensor that has each of its heads several times in a row; else the node itself.

    Such as `x[:, :, None].expand(B, H, n, S, D).reshape(B, H n, S, D)`, `repeat_interleave(x, n, 1)` or, of one head,
    `x.expand(B, n, S, D)`, in either kind of graph.
    """
    whole, source = example(node), argument(node, 0, "input")
    if whole is None or whole.dim() != 4 or not isinstance(source, Node):
        return node
    if canonical_name(node) == "repeat_interleave" and argument(node, 2, "dim") in (1, -3):
        return source if isinstance(argument(node, 1, "repeats"), int) else node
    if canonical_name(node) == "expand":
        one = example(source)
        if one is None or one.dim() != 4 or one.shape[1] != 1 or not static(whole.shape[1:2]):
            return node
        return source if same_shape(whole.shape[:1], one.shape[:1]) else node
    while canonical_name(source) == "contiguous" and isinstance(source.args[0], Node):
        source = source.args[0]
    new_axis = argument(source, 0, "input")
    if canonical_name(node) != "view" or canonical_name(source) != "expand" or not isinstance(new_axis, Node):
        return node
    x = argument(new_axis, 0, "input")
    wide, narrow = example(source), example(x)
    if wide is None or wide.dim() != 5 or narrow is None or narrow.dim() != 4 or not _inserts_third(new_axis):
        return node
    batch, heads, times, keys, width = wide.shape
    if not static((heads, times)):
        return node
    fits = same_shape(narrow.shape, (batch, heads, keys, width))
    return x if fits and same_shape(whole.shape, (batch, heads * times, keys, width)) else node


def _inserts_third(node: Node) -> bool:
    """Whether a call gives [B, H, 1, S, D] of [B, H, S, D]."""
    if canonical_name(node) == "unsqueeze":
        return argument(node, 1, "dim") in (2, -3)
    index: Any = node.args[1] if canonical_name(node) == "getitem" else None
    everything = slice(None)
    padded = (*index, *[everything] * (5 - len(index))) if isinstance(index, tuple) else ()
    return padded == (everything, everything, None, everything, everything)
