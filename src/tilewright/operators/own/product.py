"""A matrix product of fp32 by 16-bit matrix instructions: each operand is a sum of three of bf16."""

from __future__ import annotations

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, elements, nothing
from tilewright.operators.products import multiplied
from tilewright.operators.row import own
from tilewright.operators.shapes import CallAxes, Result

PRODUCTS_OF_PARTS = 6
"""Of the nine products of two such sums the six largest are computed."""


def _flops(sizes: CallSizes) -> Count:
    left = sizes.shape("left")
    return 2 * PRODUCTS_OF_PARTS * elements(sizes.result()) * left[-1] if left else 0


def _shapes(call: CallAxes) -> Result:
    right, bias = call.tensor("right"), call.axes("bias")
    if bias:
        call.names.unify(right[-1], bias[-1])
    return multiplied(call, call.tensor("left"), right)


own(
    "product(Tensor left, Tensor right, Tensor? bias) -> Tensor",
    "compute",
    arithmetic=Arithmetic(_flops, nothing),
    rate="bfloat16",
    shapes=_shapes,
    role="linear",
)
