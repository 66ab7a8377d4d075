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
"""16-bit channels that a matrix unit loads at once; libraries first pad other numbers of channels."""


def convolution_kind(node: Node) -> str:
    """`convolution` or `convolution backward`, followed by a comma and one of these words if it applies.

    `depthwise`: one channel per group; `grouped`: several groups of several channels; `padded`: 8 does not divide the
    channels; `across`: channels first in memory, which the library moves; `1x1`: a plain product.
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
    """Forward: one product, pixels × channels of the result, with sums over channels × taps (implicit GEMM: Chetlur et
    al., "cuDNN: Efficient Primitives for Deep Learning", 2014). Backward: one product for each computed gradient, of
    input and of weight. Empty for several groups, which are no such product, and for a transposed convolution."""
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
    return x, weight, node.args[strides], calls.number(node.args[groups])  # type: ignore[return-value]
