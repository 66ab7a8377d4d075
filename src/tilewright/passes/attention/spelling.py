"""Reads the many ways of writing one operator.

Dynamo records what the user wrote: `q @ k.mT`, `torch.bmm(q, k.transpose(1, 2))` and
`torch.einsum("bqd,bkd->bqk", q, k)` are three different nodes. `spelled` returns one name for each operator, also in
graphs of ATen operators; `scores_at` and `weighted_at` read a matrix product, `softmax_at` a softmax, whether it is one
call or written out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch.fx import Node

NAMES = {
    "div": ("truediv", "true_divide", "divide"),
    "mul": ("multiply", "rmul"),
    "sub": ("subtract",),
    "add": ("radd",),
    "matmul": ("bmm", "mm"),
    "softmax": ("special_softmax",),
    "logsumexp": ("special_logsumexp",),
    "transpose": ("swapaxes", "swapdims"),
    "view": ("reshape", "unflatten", "flatten"),
    "contiguous": ("clone",),
    "cast": ("to", "type_as", "type", "float", "half", "bfloat16", "double"),
    "bitwise_not": ("invert", "logical_not"),
    "and_": ("and",),
    "or_": ("or",),
}
"""The canonical name of each operator, and its other names."""
ALIASES = {alias: name for name, aliases in NAMES.items() for alias in aliases}
OF_ATEN = {"_to_copy": "cast", "_unsafe_view": "view", "__and__": "and_", "__or__": "or_"}
IN_PLACE_OPERATORS = frozenset(
    f"i{name}" for name in ("add", "sub", "mul", "truediv", "and", "or", "xor", "matmul")
) | {"setitem"}
OF_PYTHON = frozenset({"and_", "or_", "not_"})
"""Functions of `operator` that end in an underscore only because their names are keywords."""
MODES = frozenset({"_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_enter_inference_mode"})
PRODUCTS = frozenset({"matmul", "einsum", "baddbmm", "addmm"})

Scalar = Callable[[object], float | None]
"""Returns the number that an argument holds; None if it is not constant."""


class Refusal(Exception):
    """An attention cannot be rewritten; the message says why."""


def spelled(node: Node) -> str | None:
    """The canonical name of a call (`truediv`, `aten.div.Tensor` → `div`); None if the function is not torch's."""
    if isinstance(node.target, OpOverload):
        name = node.target._schema.name.partition("::")[2]
        return OF_ATEN.get(name) or ALIASES.get(name, name)
    if node.op == "call_method":
        raw = str(node.target)
    elif node.op == "call_function" and callable(node.target):
        module = getattr(node.target, "__module__", None) or "torch"
        if module.partition(".")[0] not in ("torch", "_operator", "builtins"):
            return None
        raw = getattr(node.target, "__name__", "")
    else:
        return None
    if raw.startswith("__") and raw.endswith("__"):
        raw = raw[2:-2]
    return ALIASES.get(raw, raw)


def argument(node: Node, position: int, name: str, default: object = None) -> Any:
    """An argument of a call given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def convolution_operands(node: Node) -> tuple[Any, Any, Any]:
    """input, weight and bias of a convolution."""
    return argument(node, 0, "input"), argument(node, 1, "weight"), argument(node, 2, "bias")


def where_arguments(node: Node) -> tuple[Any, Any, Any]:
    """condition, input and other of `torch.where(condition, input, other)` or `input.where(condition, other)`."""
    names = ("input", "condition", "other") if node.op == "call_method" else ("condition", "input", "other")
    call = {name: argument(node, i, name) for i, name in enumerate(names)}
    return call["condition"], call["input"], call["other"]


def example(node: object) -> torch.Tensor | None:
    """The fake tensor of a node's result; None if the result is no tensor."""
    value = node.meta.get("example_value", node.meta.get("val")) if isinstance(node, Node) else None
    return value if isinstance(value, torch.Tensor) else None


def tensor_of(node: object) -> torch.Tensor:
    """As `example`, for a node that must be a tensor."""
    value = example(node)
    if value is None:
        raise Refusal(f"{node} has no known shape")
    return value


def same_shape(a: Sequence[int | torch.SymInt], b: Sequence[int | torch.SymInt]) -> bool:
    """Whether two shapes are equal. Compares symbols by name, since comparing their values would add a guard."""
    return len(a) == len(b) and all(str(x) == str(y) for x, y in zip(a, b, strict=True))


def static(shape: Sequence[int | torch.SymInt]) -> bool:
    """Whether no size is a symbol."""
    return all(isinstance(size, int) for size in shape)


def memory_of(node: object) -> int | None:
    """The identity of the storage of a node's result; None if that is no tensor."""
    value = example(node)
    return None if value is None else value.untyped_storage()._cdata


def mutates(node: Node) -> bool:
    """Whether a call writes to one of its arguments."""
    if node.op not in ("call_function", "call_method"):
        return False
    name = spelled(node) or ""
    if name in IN_PLACE_OPERATORS or (name.endswith("_") and not name.endswith("__") and name not in OF_PYTHON):
        return True
    in_place = argument(node, 3, "inplace", False) if name == "dropout" else node.kwargs.get("inplace", False)
    return bool(in_place) or "out" in node.kwargs


def written_by(node: Node) -> Any:
    """The argument that a call that `mutates` writes to."""
    return node.kwargs.get("out") or argument(node, 0, "input")


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
    first = 1 if spelled(node) in ("baddbmm", "addmm") else 0
    names = (("batch1", "batch2"), ("mat1", "mat2"))[spelled(node) == "addmm"]
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
    if spelled(node) == "einsum":
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
    if spelled(node) == "matmul":
        return Scores(Operand(a), Operand(b), k_transposed=True)
    alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
    added = argument(node, 0, "input")
    if not isinstance(alpha, (int, float)) or not isinstance(beta, (int, float)):
        raise Refusal(f"alpha or beta of {node.name} is no number")
    # With beta = 0 the product does not read the added tensor, not even NaN.
    return Scores(Operand(a), Operand(b), True, alpha, added if beta != 0 else None, beta)


def weighted_at(node: Node, weights: Node) -> Weighted:
    """The product at `node` read as attention weights times values."""
    if spelled(node) == "einsum":
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
    if spelled(node) != "matmul" and (node.kwargs.get("beta", 1) != 0 or node.kwargs.get("alpha", 1) != 1):
        raise Refusal(f"{node.name} adds to the product")
    return Weighted(Operand(b))


def scaled_by(node: Node, scalar: Scalar) -> tuple[object, float] | None:
    """x and f where `node` is f · x, also written x · f or x / (1 / f)."""
    a, b = argument(node, 0, "input"), argument(node, 1, "other")
    if spelled(node) == "div" and node.kwargs.get("rounding_mode") is None:
        number = scalar(b)
        return (a, 1 / number) if number else None
    if spelled(node) == "mul":
        for x, other in ((a, b), (b, a)):
            if (number := scalar(other)) is not None:
                return x, number
    return None


def is_last(dim: object, rank: int) -> bool:
    """Whether a call's `dim` is the last of `rank` axes alone."""
    if isinstance(dim, (list, tuple)) and len(dim) == 1:
        dim = dim[0]
    return isinstance(dim, int) and dim in (-1, rank - 1)


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
        name, source = spelled(node), node.args[0] if node.args else None
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
            adds_axis = adds_axis or (spelled(source) == "max" and index in (0, "values"))
        # The gradient through the maximum cancels, so `detach` changes nothing.
        if not adds_axis and not (name == "detach" and kind == "max"):
            return None
        node = source


def less_maximum(node: Node) -> tuple[Node, list[Node]] | None:
    """x of `x - max(x, -1, keepdim=True)`, whose softmax is that of x, and the nodes of the maximum."""
    top = row_statistic(argument(node, 1, "other"), "max") if spelled(node) == "sub" else None
    return top if top is not None and top[0] is node.args[0] else None


def normalised(node: Node) -> tuple[Node, list[Node]] | None:
    """exp of `exp / sum(exp, -1, keepdim=True)`, and the nodes of the sum."""
    exp = argument(node, 0, "input")
    if spelled(node) != "div" or not isinstance(exp, Node) or spelled(exp) != "exp":
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
    name = spelled(node)
    source = argument(node, 0, "input")
    if name == "softmax" and isinstance(source, Node):
        if not is_last(argument(node, 1, "dim"), tensor_of(source).dim()):
            raise Refusal("the softmax does not run over the last axis")
        return Softmax(node, source, (node,))
    if name == "exp" and isinstance(source, Node):
        if spelled(source) == "log_softmax" and isinstance(source.args[0], Node):
            if not is_last(argument(source, 1, "dim"), tensor_of(source).dim()):
                raise Refusal("the softmax does not run over the last axis")
            return Softmax(node, source.args[0], (node, source))
        if spelled(source) == "sub":
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
