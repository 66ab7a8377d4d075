"""A linear layer and the GELU after it in one kernel, in a compiled program.

    y = gelu(addmm(b, x, t(w)))                                  →   y, _ = linear_gelu(x, w, b, …, False)

    pre = addmm(b, x, t(w)); y = gelu(pre)                       →   y, pre = linear_gelu(x, w, b, …, True)
    dpre = gelu_backward(dy, pre); dw = mm(t(…), y)                  dw = mm(t(…), gelu(pre))

Backward recomputes y from `pre`, which it reads anyway.
"""

from __future__ import annotations

import operator
from collections.abc import Container
from math import prod
from typing import Any

import torch
from torch.fx import Node

from tilewright.cost.work import Work
from tilewright.graph import calls
from tilewright.graph.calls import readers
from tilewright.graph.insert import insert_again, insert_call
from tilewright.hardware.target import FOR_GPUS, Target
from tilewright.kernels.linear.cuda import COLUMNS, ROWS, VECTOR
from tilewright.kernels.offer import Candidate, Offer, hand_late, is_late
from tilewright.launch.nvrtc import bindings_installed

aten = torch.ops.aten
PRODUCTS = {"aten.addmm.default": 1, "aten.mm.default": 0}
"""By operator, the place of the left operand."""
TRANSPOSING = ("t", "permute", "transpose")


def offers(node: Node, target: Target, waiting: Container[Node]) -> list[Offer]:
    """An offer for the GELU `node` and the product before it, with views between them; empty without a product."""
    product = calls.through(node.all_input_nodes[0], calls.is_view)
    if str(product.target) not in PRODUCTS or product.kwargs:
        return []
    x, weight, bias = _operands(product)
    values = [calls.output(one) for one in (x, weight, product, node)]
    if any(value is None for value in values) or node in waiting:
        return []
    refusal = _refusal(node, product, [value for value in values if value is not None], bias, target)
    keep = any(reader is not node for reader in readers(product))
    work = _work(product, x, weight, keep)
    what = ("tilewright.linear_gelu", "a product and the GELU behind it")
    return [Offer(*what, node, lambda: _apply(node, product, keep, waiting), refusal, (product, node), (work,))]


def _operands(product: Node) -> tuple[Node, Node, Node | None]:
    """x [M, K], weight [N, K] and bias; without a transposition the right operand [K, N] stands for the weight."""
    first = PRODUCTS[str(product.target)]
    x, right = product.args[first : first + 2]
    assert isinstance(x, Node) and isinstance(right, Node)
    bias = product.args[0] if first else None
    assert bias is None or isinstance(bias, Node)
    transposed = calls.operator_name(right.target) in TRANSPOSING
    return x, right.all_input_nodes[0] if transposed else right, bias


def _refusal(node: Node, product: Node, values: list[torch.Tensor], bias: Node | None, target: Target) -> str | None:
    """Why the kernel does not support these operands; None if it does. `values`: x, weight, product, GELU."""
    x, weight, result, gelu = values
    if target.language != "triton" or not target.is_gpu:
        return FOR_GPUS
    if not target.has_wgmma:
        return "its kernel takes the matrix instructions of a warpgroup (wgmma)"
    if target.is_present and not bindings_installed():
        return "the package cuda-bindings, which builds it, is not installed"
    if x.dtype not in (torch.bfloat16, torch.float16) or {weight.dtype, result.dtype, gelu.dtype} != {x.dtype}:
        return "its kernel takes 16-bit floats"
    (m, k), (n, inner) = calls.shape_of(x), calls.shape_of(weight)
    fits = inner == k and calls.shape_of(result) == (m, n) and k % VECTOR == n % VECTOR == 0
    if not fits or not all(value.is_contiguous() for value in (x, weight, gelu)):
        return "its operands do not lie in rows of whole vectors"
    vector = None if bias is None else calls.output(bias)
    if bias is not None and (vector is None or calls.shape_of(vector) != (n,) or vector.dtype != x.dtype):
        return "what is added is no bias of its columns"
    if -(-m // ROWS) * -(-n // COLUMNS) < target.profile.sms:
        return "it has fewer tiles than there are multiprocessors"
    if any(calls.operator_name(reader.target) not in ("gelu", "gelu_backward") for reader in readers(product)):
        return "something else reads the product"
    return None


def _work(product: Node, x: Node, weight: Node, keep: bool) -> Work:
    values = [calls.output(one) for one in (x, weight, product)]
    sizes = [0 if value is None else prod(calls.shape_of(value)) * value.element_size() for value in values]
    shape, dtype = calls.shape_of(values[0]), calls.dtype_name(values[0].dtype)  # type: ignore[arg-type,union-attr]
    m, k = shape[0], shape[-1]
    n = calls.shape_of(values[2])[-1]  # type: ignore[arg-type]
    written = sizes[2] * (1 + keep)
    return Work(
        "tilewright.linear_gelu", sizes[0] + sizes[1], written, 2 * m * n * k, dtype=dtype, products=((1, m, n, k),)
    )


def _apply(node: Node, product: Node, keep: bool, waiting: Container[Node]) -> Node:
    from tilewright.kernels import linear as _defines_the_operators  # noqa: F401

    ours: Any = torch.ops.tilewright
    approximate = calls.arguments(node).get("approximate") or "none"
    x, weight, bias = _operands(product)
    new = insert_call(product, ours.linear_gelu.default, x, weight, bias, approximate, keep)
    y, pre = (insert_call(product, operator.getitem, new, number) for number in range(2))
    result = _seen_alike(node, node.all_input_nodes[0], product, y)
    if keep:
        if any(is_late(reader, waiting) for reader in readers(node)):
            again = insert_call(node, aten.gelu.default, node.args[0], approximate=approximate)
            hand_late(node, again, waiting)
        product.replace_all_uses_with(pre)
    node.replace_all_uses_with(result)
    return new


def _seen_alike(before: Node, view: Node, product: Node, y: Node) -> Node:
    """`y` under the chain of views from `product` to `view`; sizes may be symbolic."""
    if view is product:
        return y
    return insert_again(before, view, _seen_alike(before, view.all_input_nodes[0], product, y))


CANDIDATE = Candidate(frozenset({"aten.gelu.default"}), offers)
