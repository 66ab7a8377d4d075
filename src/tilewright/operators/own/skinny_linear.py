"""Up to three products of a few rows with weights, and what follows the first."""

from __future__ import annotations

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, elements, nothing
from tilewright.operators.row import Traffic, own
from tilewright.operators.shapes import Axes, CallAxes, Result


def _flops(sizes: CallSizes) -> Count:
    x = sizes.shape("x")
    assert x is not None
    total: Count = 0
    for name in ("w0", "w1", "w2"):
        weight = sizes.shape(name)
        if weight is not None:
            total = total + 2 * x[0] * elements(weight)
    return total


def _shapes(call: CallAxes) -> Result:
    """x [rows, in] with each weight [out, in]; a gated pair gives one result."""
    x, found = call.tensor("x"), list[Axes | None]()
    for name in ("w0", "w1", "w2"):
        weight = call.axes(name)
        if weight is not None:
            call.names.unify(x[1], weight[1])
        gated = bool(found) and call.arguments.get("activation") == "swiglu"
        found.append(None if weight is None or gated else (x[0], weight[0]))
    return found


own(
    "skinny_linear(Tensor x, Tensor? gain, float eps, Tensor w0, Tensor? w1, Tensor? w2, Tensor? b0, Tensor? b1, "
    "Tensor? b2, Tensor? residual, str activation, Tensor? zeros) -> (Tensor, Tensor, Tensor)",
    "compute",
    arithmetic=Arithmetic(_flops, nothing),
    traffic=Traffic(unread=("zeros",)),
    shapes=_shapes,
    dtypes=("x", "x", "x"),
    role="linear",
)
