"""Each row's sum with weights, and its gradients."""

from __future__ import annotations

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, each, elements, nothing, of_argument
from tilewright.operators.language import Value
from tilewright.operators.row import Call, own
from tilewright.operators.shapes import CallAxes, Result


def _backward_flops(sizes: CallSizes) -> Count:
    wanted = int(bool(sizes.argument("want_dx"))) + 2 * int(bool(sizes.argument("want_dw")))
    return elements(sizes.shape("x")) * wanted


def _forward(call: CallAxes) -> Result:
    x, w = call.tensor("x"), call.tensor("w")
    call.names.unify(x[1], w[0])
    return x[:1]


def _backward(call: CallAxes) -> Result:
    x, w = call.tensor("x"), call.tensor("w")
    call.names.unify(x[1], w[0])
    call.names.unify(x[0], call.tensor("dy")[0])
    return [x if call.arguments.get("want_dx") else None, w if call.arguments.get("want_dw") else None]


def _gradients(
    c: Call, dy: Value, x: Value, w: Value, want_dx: bool, want_dw: bool
) -> tuple[Value | None, Value | None]:
    dy = dy.unsqueeze(1)
    return dy * w if want_dx else None, (dy * x).sum(0, keepdim=False) if want_dw else None


own(
    "weighted_sum(Tensor x, Tensor w) -> Tensor",
    "reduction",
    lambda c, x, w: (x * w).sum(1, keepdim=False),
    arithmetic=each(of_argument("x"), 2),
    shapes=_forward,
    dtypes=("x",),
)
own(
    "weighted_sum_backward(Tensor dy, Tensor x, Tensor w, bool want_dx, bool want_dw) -> (Tensor, Tensor)",
    "reduction",
    _gradients,
    arithmetic=Arithmetic(_backward_flops, nothing),
    shapes=_backward,
    dtypes=("x", "w"),
)
