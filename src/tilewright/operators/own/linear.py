"""x · weightᵀ, where a bias is what the accumulator starts from, and the GELU of each element of it."""

from __future__ import annotations

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, elements
from tilewright.operators.own.activation import ACTIVATION, kind_of, role
from tilewright.operators.row import own
from tilewright.operators.shapes import Axes, CallAxes, Result


def _gelu_flops(sizes: CallSizes) -> Count:
    x = sizes.shape("x")
    return elements(sizes.result()) * ((2 * x[-1] if x else 0) + ACTIVATION[kind_of(sizes)][0])


def _linear(call: CallAxes) -> Axes:
    """x[rows, in] · weight[out, in]ᵀ."""
    x, weight = call.tensor("x"), call.tensor("weight")
    call.names.unify(x[1], weight[1])
    bias = call.axes("bias")
    return call.broadcast((x[0], weight[0]), *([] if bias is None else [bias]))


def _gelu(call: CallAxes) -> Result:
    """The second result, kept for backward, has the same shape; without `keep` it is absent."""
    out = _linear(call)
    return [out, out if call.arguments.get("keep") is True else None]


own(
    "linear_gelu(Tensor x, Tensor weight, Tensor? bias, str approximate, bool keep) -> (Tensor, Tensor)",
    "compute",
    arithmetic=Arithmetic(_gelu_flops, lambda sizes: elements(sizes.result()) * ACTIVATION[kind_of(sizes)][1]),
    shapes=_gelu,
    dtypes=("x", "x"),
    role=role("linear", "act"),
)
