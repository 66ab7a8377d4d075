"""On a device with Triton, an RMS norm that the program writes out becomes one operator, forward and backward.

    f = x.float(); v = f.pow(2).mean(-1, keepdim=True)                 before autograd
    y = w * (f * rsqrt(v + eps)).to(x.dtype)            →   y = rms_norm(x, w, eps)

Written out, autograd differentiates every step, with a pass over memory for most and sums over all rows that take 25
times as long as their traffic (318 µs for 50 MB on an H200). `norm_as_one` writes tilewright's operator, which has a
gradient; in the joint graph `as_aten` converts both to PyTorch's fused operators, for which `candidates` then chooses a
kernel.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.canonical import argument, canonical_name, example, is_last, mutates
from tilewright.graph.insert import insert_call, insert_known
from tilewright.graph.source import source_line
from tilewright.hardware.target import Target
from tilewright.kernels.device import DTYPES
from tilewright.passes.attention.writer import Writer
from tilewright.records.program import Decision

MARK = "tilewright_written_out"
STEPS = frozenset({"cast", "pow", "square", "mul", "mean", "add", "rsqrt", "rms_norm"})
SMALLEST = torch.finfo(torch.float32).eps
"""PyTorch's eps if the caller gives none."""
aten = torch.ops.aten


@dataclass(frozen=True)
class _Norm:
    """x / √(mean(x²) + eps) · weight over the last axis; the node `result` has its value."""

    result: fx.Node
    x: fx.Node
    weight: fx.Node | None
    eps: float


def norm_as_one(graph: fx.Graph, target: Target) -> list[Decision]:
    """Rewrite `graph`, a torch-level graph from Dynamo, in place; a decision for each norm."""
    if target.language != "triton":
        return []
    found = [norm for node in graph.nodes if (norm := _called(node) or _written_out(node)) is not None]
    return [_replace(norm) for norm in found if _may_move(norm)]


def _called(node: fx.Node) -> _Norm | None:
    """A call of PyTorch's RMS norm over the last axis."""
    if canonical_name(node) != "rms_norm":
        return None
    x, weight, eps = argument(node, 0, "input"), argument(node, 2, "weight"), argument(node, 3, "eps")
    shape = argument(node, 1, "normalized_shape")
    if len(shape) != 1 or not _takes(x, weight) or _dtype(node) != _dtype(x):
        return None
    return _Norm(node, x, weight, SMALLEST if eps is None else float(eps))


def _written_out(root: fx.Node) -> _Norm | None:
    """The norm whose rsqrt is `root`."""
    if canonical_name(root) != "rsqrt" or len(root.users) != 1:
        return None
    mean, eps = _sum_with_number(root.args[0])
    wide = _squared(argument(mean, 0, "input")) if mean is not None and _is_row_mean(mean) else None
    if wide is None:
        return None
    x = wide
    if canonical_name(wide) == "cast" and _dtype(wide) == torch.float32 and isinstance(wide.args[0], fx.Node):
        x = wide.args[0]
    scaled = next(iter(root.users))
    if canonical_name(scaled) != "mul" or not ({*scaled.args} - {root} <= {x, wide}) or not _takes(x, None):
        return None
    return _longest(scaled, x, eps)


def _longest(scaled: fx.Node, x: fx.Node, eps: float) -> _Norm | None:
    """The norm with the cast and the weight that follow it, as far as the last value that has x's dtype."""
    best = None if _dtype(scaled) != _dtype(x) else _Norm(scaled, x, None, eps)
    node, weight = scaled, None
    while len(node.users) == 1:
        user = next(iter(node.users))
        if canonical_name(user) == "mul" and weight is None and len(user.args) == 2:
            other = user.args[1] if user.args[0] is node else user.args[0]
            if not _takes(x, other) or not isinstance(other, fx.Node):
                break
            weight = other
        elif canonical_name(user) != "cast" or user.args[0] is not node:
            break
        node = user
        if _dtype(node) == _dtype(x):
            best = _Norm(node, x, weight, eps)
    return best


def _sum_with_number(node: object) -> tuple[fx.Node | None, float]:
    """The operands of a sum of a tensor and a number."""
    if not isinstance(node, fx.Node) or canonical_name(node) != "add" or len(node.args) != 2 or node.kwargs:
        return None, 0.0
    numbers = [value for value in node.args if isinstance(value, (int, float))]
    tensors = [value for value in node.args if isinstance(value, fx.Node)]
    return (tensors[0], float(numbers[0])) if len(numbers) == len(tensors) == 1 else (None, 0.0)


def _is_row_mean(node: fx.Node) -> bool:
    value = example(argument(node, 0, "input"))
    is_over_rows = value is not None and is_last(argument(node, 1, "dim"), value.dim())
    return canonical_name(node) == "mean" and is_over_rows and argument(node, 2, "keepdim") is True


def _squared(node: object) -> fx.Node | None:
    """x, if `node` is x², written as a product, a power or `square`."""
    if not isinstance(node, fx.Node):
        return None
    name, source = canonical_name(node), node.args[0] if node.args else None
    twice = name == "mul" and len(node.args) == 2 and node.args[1] is source
    power = name == "pow" and argument(node, 1, "exponent") == 2
    return source if isinstance(source, fx.Node) and (twice or power or name == "square") else None


def _dtype(node: object) -> torch.dtype | None:
    value = example(node)
    return None if value is None else value.dtype


def _takes(x: object, weight: object) -> bool:
    """Whether the operator accepts x [..., columns] and a weight [columns]."""
    value, vector = example(x), example(weight)
    if value is None or value.dtype not in DTYPES or value.dim() < 1 or not value.is_contiguous():
        return False
    columns = value.shape[-1]
    if not isinstance(columns, int) or columns == 0:
        return False
    return weight is None or (vector is not None and vector.dtype in DTYPES and tuple(vector.shape) == (columns,))


def _may_move(norm: _Norm) -> bool:
    """Whether no call between x and the result writes to a tensor, so that one operator can replace the steps."""
    order = list(norm.x.graph.nodes)
    return not any(mutates(node) for node in order[order.index(norm.x) : order.index(norm.result)])


def _replace(norm: _Norm) -> Decision:
    from tilewright.kernels import norm as _defines_the_operators  # noqa: F401

    source = source_line(norm.result)
    write = Writer(norm.result.graph, norm.result)
    call = write.call(torch.ops.tilewright.norm.default, norm.x, norm.weight, None, norm.eps, False)
    # The one key of a node's metadata that AOTAutograd carries over as it is.
    call.meta["custom"] = {**call.meta.get("custom", {}), MARK: True}
    result = write.call(operator.getitem, call, 0)
    norm.result.replace_all_uses_with(result)
    _erase_unread(norm.result)
    reason = "an RMS norm that is written out is one operator, forward and backward"
    return Decision("forward", norm.x.name, result.name, "taken", reason, source=source, passed_by="rms_norm")


def _erase_unread(node: fx.Node) -> None:
    """Erase the steps of a norm that have no reader left."""
    todo, erased = [node], set[fx.Node]()
    while todo:
        step = todo.pop()
        if step not in erased and not step.users and canonical_name(step) in STEPS:
            erased.add(step)
            todo += step.all_input_nodes
            step.graph.erase_node(step)


def as_aten(graph: fx.Graph, target: Target) -> None:
    """Convert the norms that `norm_as_one` wrote to PyTorch's fused form, in a joint or inference graph."""
    for node in list(graph.nodes):
        if str(node.target) == "tilewright.norm.default" and MARK in node.meta.get("custom", {}):
            _lower(node)


def _lower(node: fx.Node) -> None:
    x, weight, _, eps, _ = node.args
    assert isinstance(x, fx.Node)
    value = calls.tensor(x)
    shape = [value.shape[-1]]
    rstd_like = value.new_empty((*value.shape[:-1], 1), dtype=torch.float32)
    results = {int(str(user.args[1])): user for user in node.users}
    new = insert_known(node, aten._fused_rms_norm.default, (node.meta["val"][0], rstd_like), x, shape, weight, eps)
    y, rstd = (insert_call(node, operator.getitem, new, i) for i in range(2))
    backwards = [user for user in results[2].users] if 2 in results else []
    for backward in backwards:
        assert str(backward.target) == "tilewright.norm_backward.default"
        dx, dw, _ = backward.meta["val"]
        wanted = [True, weight is not None]
        gradient = insert_known(
            backward, aten._fused_rms_norm_backward.default, (dx, dw if weight is not None else None),
            backward.args[0], x, shape, rstd, weight, wanted,
        )  # fmt: skip
        for user in list(backward.users):
            place: Any = user.args[1]
            result = insert_known(backward, operator.getitem, gradient.meta["val"][place], gradient, place)
            user.replace_all_uses_with(result)
    if 0 in results:
        results[0].replace_all_uses_with(y)
