"""Convolutions: the kinds by which libraries compute them, and the equivalent matrix products."""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING

from tilewright.cost.work import Product
from tilewright.graph import calls

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Node

ALIGNED = 8
"""Channels of 16 bits that a matrix unit loads at once; others are padded first."""


def convolution_kind(node: Node) -> str:
    """`convolution` or `convolution backward`, and after a comma what sets it apart.

    `depthwise`: one channel in a group; `grouped`: several in each of several; `padded`: channels that 8 does not
    divide; `across`: channels first, which are moved; `1x1`: a plain product.
    """
    name = "convolution backward" if _is_backward(node) else "convolution"
    x, weight, stride, groups = _operands(node)
    if groups > 1:
        return f"{name}, {'depthwise' if weight.shape[1] == 1 else 'grouped'}"
    if x.shape[1] % ALIGNED or weight.shape[0] % ALIGNED:
        return f"{name}, padded"
    if x.stride(1) != 1:
        return f"{name}, across"
    if prod(weight.shape[2:]) == 1 and prod(stride) == 1:
        return f"{name}, 1x1"
    return name


def convolution_products(node: Node) -> tuple[Product, ...]:
    """Of the result: pixels × channels, each a sum over channels × taps (implicit GEMM: Chetlur et al., "cuDNN:
    Efficient Primitives for Deep Learning", 2014). Backward: of the gradients of input and weight, those that are
    computed. None for several groups, which are no such product, nor for a transposed convolution."""
    x, weight, _, groups = _operands(node)
    if groups > 1 or node.args[7 if _is_backward(node) else 6]:
        return ()
    made, inner, taps = weight.shape[0], weight.shape[1], prod(weight.shape[2:])
    if not _is_backward(node):
        y = calls.outputs(node)[0]
        assert y is not None
        return ((1, y.shape[0] * prod(y.shape[2:]), made, inner * taps),)
    gradient = calls.tensor(node.args[0])
    pixels, of_input = (t.shape[0] * prod(t.shape[2:]) for t in (gradient, x))
    both = ((1, of_input, inner, made * taps * pixels // of_input), (1, made, inner * taps, pixels))
    wanted: list[bool] = node.args[10]  # type: ignore[assignment]
    return tuple(product for product, is_wanted in zip(both, wanted[:2], strict=True) if is_wanted)


def _is_backward(node: Node) -> bool:
    return "backward" in calls.operator_name(node.target)


def _operands(node: Node) -> tuple[Tensor, Tensor, list[int], int]:
    """Input, weight, stride and groups of `convolution` or `convolution_backward`."""
    first, strides, groups = (1, 4, 9) if _is_backward(node) else (0, 3, 8)
    x, weight = (calls.tensor(operand) for operand in node.args[first : first + 2])
    return x, weight, node.args[strides], node.args[groups]  # type: ignore[return-value]
