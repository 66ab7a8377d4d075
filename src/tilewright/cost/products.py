"""Calls of libraries as the matrix products that they are."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tilewright.cost.convolutions import convolution_products
from tilewright.cost.work import Product
from tilewright.graph import calls
from tilewright.operators.table import row_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Node

FACTORS = {"mm": (0, 1), "bmm": (0, 1), "addmm": (1, 2), "addmm_": (1, 2), "baddbmm": (1, 2)}
"""Positions of the two."""
LINEAR = ("tilewright.linear_gelu", "tilewright.linear_dropout_add")
"""Products of rows with the rows of a weight."""


def products_of(node: Node, flops: int) -> tuple[Product, ...]:
    """(batch, M, N, K) of the products in a matrix product, a convolution or attention on [B, H, S, d], else ()."""
    name = calls.operator_name(node.target)
    if "convolution" in name:
        return convolution_products(node) if name in ("convolution", "convolution_backward") else ()
    if is_attention(node):
        return _attention_product(node, flops)
    if name in LINEAR:
        x, weight = map(_shape, node.args[:2])
        return ((1, prod(x[:-1]), weight[0], x[-1]),)
    places = FACTORS.get(name)
    if places is None:
        return ()
    left, right = (_shape(node.args[place]) for place in places)
    return ((prod(left[:-2]), left[-2], right[-1], left[-1]),)


def is_attention(node: Node) -> bool:
    """Whether the operator, PyTorch's or our own, is attention or its gradients."""
    row = row_of(node.target)
    return row is not None and row.role in ("attention", "attention backward")


def _attention_product(node: Node, flops: int) -> tuple[Product, ...]:
    """The weights of a head's queries times the values; K counts the other products too, and no hidden pairs."""
    arguments = calls.arguments(node)
    shape = _shape(arguments.get("query", arguments.get("q")))
    if len(shape) != 4 or calls.operator_name(node.target).startswith(("_flash", "_efficient")):
        return ()
    heads, rows, width = prod(shape[:2]), *shape[2:]
    return ((heads, rows, width, flops // (2 * heads * rows * width or 1)),)


def _shape(operand: object) -> tuple[int, ...]:
    value: Tensor | None = calls.output(operand)  # type: ignore[arg-type]
    assert value is not None
    return calls.shape_of(value)
