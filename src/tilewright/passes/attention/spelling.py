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
from tilewright.passes.rule import Call, Match, Value, call, matches
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


def _columns(kind: str, over: Any, name: str) -> tuple[Call, ...]:
    """Patterns of a statistic [..., 1] of the rows of `over`: `x.amax(-1, keepdim=True)` and its spellings.

    `kind` is "max", "sum" or "logsumexp"; `name` binds it, and `name_dim` its axis.
    """
    # The gradient through the maximum cancels, so `detach` changes nothing.
    options: dict[str, Any] = {"through": ("detach",) if kind == "max" else ()}
    given = {"input": over, "dim": Value(f"{name}_dim")}

    def of_rows(name: str = "") -> tuple[Call, ...]:
        if kind != "max":
            return (call(kind, ..., **given, name=name, **options),)
        both = call("max", ..., **given)
        values = call("getitem", both, 0, name=name, **options), call("getattr", both, "values", name=name, **options)
        return call("amax", ..., **given, name=name, **options), *values

    wider = call("unsqueeze", of_rows(), ..., name=name, **options)
    return *of_rows(name), wider, call("getitem", of_rows(), _is_constant, name=name, **options)


def _is_constant(index: object) -> bool:
    """Whether an index of several axes is the same in each call; the shapes say whether it only adds an axis."""
    return isinstance(index, tuple) and not any(isinstance(one, Node) for one in index)


def _less_maximum(x: Any, **options: Any) -> Call:
    """The pattern of `x - max(x, -1, keepdim=True)`, whose softmax is that of x."""
    return call("sub", x, _columns("max", x, "top"), **options)


LESS_MAXIMUM = _less_maximum("source")
EXP, LARGE_EXP = (call("exp", x) for x in (LESS_MAXIMUM, "source"))
NOT_SHIFTED = call("div", LARGE_EXP, _columns("sum", LARGE_EXP, "total"))
DIM = Value("dim")
BESIDE = call("cat", ["source", "sink"], dim=Value("cat_dim"), through=("cast",))
OF_BOTH = tuple(
    call("softmax", ..., input=x, dim=DIM, alone=True, through=("cast", "contiguous"))
    for x in (BESIDE, _less_maximum(BESIDE, through=("cast",)))
)
SOFTMAX = (
    call("softmax", ..., input="source", dim=DIM),
    call("exp", call("log_softmax", ..., input="source", dim=DIM)),
    call("exp", call("sub", "source", _columns("logsumexp", "source", "total"))),
    call("div", EXP, _columns("sum", EXP, "total")),
    call("getitem", OF_BOTH, lambda index: isinstance(index, tuple) and index[-1:] == (slice(None, -1),)),
)
"""As one call, written out, or of scores and a sink, whose weight is left out."""
ENDS = frozenset({"softmax", "exp", "div", "getitem"})
"""The calls that give its result."""


@dataclass(frozen=True)
class Softmax:
    """A softmax over the last axis: its result, its input, and the nodes that compute it."""

    result: Node
    source: Node
    inside: tuple[Node, ...]
    sink: Node | None = None
    """[*lead, Nq, 1]: one more score of each row (an attention sink); `result` is without its weight."""


def softmax_at(node: Node) -> Softmax | None:
    """The softmax with the result `node`, if it is one."""
    found = match_of_rows(SOFTMAX, node)
    if found is None or not same_shape(tensor_of(node).shape, tensor_of(found["source"]).shape):
        return None
    return Softmax(node, found["source"], tuple(dict.fromkeys(found["calls"])), found.get("sink"))


def match_of_rows(pattern: Any, node: Node) -> Match | None:
    """The first match whose statistics, and sink, have one number for each row of `source`."""
    for found in matches(pattern, node):
        rank = tensor_of(found["source"]).dim()
        axes = [axis for name, axis in found.items() if name.endswith("dim")]
        columns = [tensor_of(found[name]) for name in ("top", "total", "sink") if name in found]
        of_rows = all(x.dim() == rank and str(x.shape[-1]) == "1" for x in columns)
        if of_rows and all(is_last(axis, rank) for axis in axes):
            return found
    return None


def why_no_softmax(node: Node) -> str | None:
    """Why a call that is no `softmax_at` is none over the last axis; None if it does not look like one."""
    if match_of_rows(NOT_SHIFTED, node) is not None:
        return "exp without the row maximum subtracted: eager overflows, the fused form does not"
    return {
        "softmax": "the softmax does not run over the last axis",
        "exp": "exp between two products that is not normalised as a softmax over the last axis",
    }.get(str(canonical_name(node)))


ALL = slice(None)
INSERTED = (ALL, ALL, None, ALL, ALL)
THIRD = (
    call("unsqueeze", "x", lambda dim: dim in (2, -3)),
    call("getitem", "x", lambda index: isinstance(index, tuple) and (*index, ALL, ALL)[:5] == INSERTED),
)
REPEATED = (
    call("repeat_interleave", "x", ..., repeats=Value("times", (int,)), dim=lambda dim: dim in (1, -3)),
    call("expand", "x", ...),
    call("view", call("expand", THIRD, ..., name="wide", through=("contiguous",)), ...),
)


def unrepeated(node: Node) -> Node:
    """x [B, H, S, D] of a tensor that has each of its heads several times in a row; else the node itself.

    Such as `x[:, :, None].expand(B, H, n, S, D).reshape(B, H n, S, D)`, `repeat_interleave(x, n, 1)` or, of one head,
    `x.expand(B, n, S, D)`, in either kind of graph.
    """
    for found in matches(REPEATED, node):
        x: Node = found["x"]
        whole, narrow, wide = tensor_of(node), tensor_of(x), example(found.get("wide"))
        if whole.dim() != 4 or narrow.dim() != 4:
            continue
        fits = canonical_name(node) == "repeat_interleave"
        if wide is not None and wide.dim() == 5 and static(wide.shape[1:3]):
            batch, heads, times, *matrix = wide.shape
            fits = same_shape(narrow.shape, (batch, heads, *matrix))
            fits = fits and same_shape(whole.shape, (batch, heads * times, *matrix))
        elif canonical_name(node) == "expand":
            fits = narrow.shape[1] == 1 and static(whole.shape[1:2]) and same_shape(whole.shape[:1], narrow.shape[:1])
        if fits:
            return x
    return node
