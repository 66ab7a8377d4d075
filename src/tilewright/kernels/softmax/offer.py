"""Softmax and log-softmax over rows in a compiled program, forward and backward, each for itself.

    y = _softmax(x, -1, False)                                   →   y = softmax(x, False)
    dx = _softmax_backward_data(dy, y, -1, dtype)                →   dx = softmax_backward(y, dy, False)

Generated kernels compute the same, but read rows beyond 16384 columns three times: these kernels win on rows beyond
`LONGEST_GENERATED` if nothing else fuses with a softmax.
"""

from __future__ import annotations

from collections.abc import Container
from math import prod
from typing import Any

import torch
from torch.fx import Node

from tilewright.cost.work import Work
from tilewright.graph import calls
from tilewright.graph.insert import insert_call
from tilewright.hardware.target import FOR_GPUS, Target
from tilewright.kernels.offer import Candidate, Offer
from tilewright.kernels.row import ELEMENTS
from tilewright.kernels.softmax import cuda

FORWARD = ("_softmax", "_log_softmax")
BACKWARD = ("_softmax_backward_data", "_log_softmax_backward_data")


def offers(node: Node, target: Target, _: Container[Node]) -> list[Offer]:
    """The softmax, or its gradient, that `node` is; nothing over another axis than the last."""
    result = calls.output(node)
    operands = [calls.output(operand) for operand in node.all_input_nodes]
    axis = calls.arguments(node)["dim"]
    if result is None or None in operands or axis not in (-1, result.dim() - 1) or not result.dim():
        return []
    tensors = [result, *(operand for operand in operands if operand is not None)]
    refusal = _refusal(tensors, target)
    if len(operands) > 1 and calls.class_of(node.all_input_nodes[1]) == "pointwise":
        refusal = "the softmax is computed where it is read"
    work = _work(node, result, len(operands))
    return [Offer("tilewright.softmax", "softmax of rows", node, lambda: _apply(node), refusal, (node,), (work,))]


def _refusal(tensors: list[torch.Tensor], target: Target) -> str | None:
    """Why the kernels do not take these rows here; None where they do."""
    if target.language != "triton":
        return FOR_GPUS
    if target.is_gpu and not target.has_clusters:
        return "its kernels take thread-block clusters"
    if tensors[0].dtype not in ELEMENTS or len({tensor.dtype for tensor in tensors}) > 1:
        return f"its kernels take {', '.join(str(dtype) for dtype in ELEMENTS)}, and give what they take"
    if 0 in (shape := calls.shape_of(tensors[0])) or shape[-1] * tensors[0].element_size() <= cuda.LONGEST_GENERATED:
        return "a generated kernel is as fast on short rows"
    if not all(tensor.is_contiguous() for tensor in tensors):
        return "its rows do not lie side by side"
    return None


def _work(node: Node, result: torch.Tensor, operands: int) -> Work:
    count = prod(calls.shape_of(result))
    nbytes = count * result.element_size()
    backward = "_backward" if operands > 1 else ""
    return Work(f"tilewright.softmax{backward}", operands * nbytes, nbytes, 4 * count, count)


def _apply(node: Node) -> Node:
    ours: Any = torch.ops.tilewright
    name = calls.operator_name(node.target)
    log = name.startswith("_log")
    if name in BACKWARD:
        gradient, y = node.args[:2]
        new = insert_call(node, ours.softmax_backward.default, y, gradient, log)
    else:
        new = insert_call(node, ours.softmax.default, node.args[0], log)
    node.replace_all_uses_with(new)
    return new


CANDIDATE = Candidate(frozenset(f"aten.{name}.default" for name in (*FORWARD, *BACKWARD)), offers)
