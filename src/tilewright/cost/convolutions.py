"""Convolutions by how a library computes them, and as the matrix product that each is."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tilewright.graph import calls

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Node

ALIGNED = 8
"""Channels of 16 bits that a matrix unit loads at once; others are padded first."""


def convolution_kind(node: Node) -> str:
    """`convolution` or `convolution backward`, and after a comma what sets it apart.

    `depthwise`: several groups; `padded`: channels that 8 does not divide; `across`: channels first, which are moved;
    `1x1`: a plain product.
    """
    name = "convolution backward" if _is_backward(node) else "convolution"
    x, weight, stride, groups = _operands(node)
    if groups > 1:
        return f"{name}, depthwise"
    if x.shape[1] % ALIGNED or weight.shape[0] % ALIGNED:
        return f"{name}, padded"
    if x.stride(1) != 1:
        return f"{name}, across"
    if prod(weight.shape[2:]) == 1 and prod(stride) == 1:
        return f"{name}, 1x1"
    return name


def convolution_product(node: Node) -> tuple[int, int, int, int] | None:
    """1; pixels of all results; channels of one; and channels × taps that each sums (implicit GEMM: Chetlur et al.,
    "cuDNN: Efficient Primitives for Deep Learning", 2014). None for several groups, which are no such product."""
    _, weight, _, groups = _operands(node)
    y = calls.outputs(node)[0]
    assert y is not None
    return None if groups > 1 else (1, y.shape[0] * prod(y.shape[2:]), y.shape[1], prod(weight.shape[1:]))


def _is_backward(node: Node) -> bool:
    return "backward" in calls.operator_name(node.target)


def _operands(node: Node) -> tuple[Tensor, Tensor, list[int], int]:
    """Input, weight, stride and groups of `convolution` or `convolution_backward`."""
    first, strides, groups = (1, 4, 9) if _is_backward(node) else (0, 3, 8)
    x, weight = (calls.output(operand) for operand in node.args[first : first + 2])  # type: ignore[arg-type]
    assert x is not None and weight is not None
    return x, weight, node.args[strides], node.args[groups]  # type: ignore[return-value]
