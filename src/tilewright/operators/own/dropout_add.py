"""Dropout of an activation, added to a residual. The state of the draw is two numbers, or a mask on a CPU."""

from __future__ import annotations

from tilewright.operators.arithmetic import of_argument
from tilewright.operators.own.activation import acting, role
from tilewright.operators.row import own
from tilewright.operators.shapes import Axes, CallAxes, Result, like


def drawn_state(call: CallAxes, like: Axes) -> Axes:
    """The axes of the second result: two numbers, or `like` if the captured call has a mask of that shape."""
    if call.known is not None and len(call.known[1] or ()) == len(like):
        return like
    return call.names.unknown_shape((2,))


def _forward(call: CallAxes) -> Result:
    out = call.broadcast(call.tensor("x"), call.tensor("residual"))
    return [out, drawn_state(call, out)]


own(
    "dropout_add(Tensor x, Tensor residual, float p, str kind, int alignment) -> (Tensor, Tensor)",
    "pointwise",
    pure=False,
    arithmetic=acting(of_argument("x"), 1, acts=True, drops=True, untold="none"),
    shapes=_forward,
    dtypes=("x", "int64"),
    role=role("act", "dropout", "residual"),
)
own(
    "dropout_add_backward(Tensor dout, Tensor? x, Tensor state, float p, str kind, int alignment) -> Tensor",
    "pointwise",
    arithmetic=acting(of_argument("dout"), slopes=True, drops=True, untold="none"),
    shapes=like("dout"),
    dtypes=("dout",),
    role=role("act", "dropout", "residual", backward=True),
)
