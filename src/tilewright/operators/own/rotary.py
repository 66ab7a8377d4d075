"""Rotary embedding of queries and keys."""

from __future__ import annotations

from tilewright.operators.arithmetic import each, of_argument
from tilewright.operators.row import own
from tilewright.operators.shapes import CallAxes, Result


def _shapes(call: CallAxes) -> Result:
    """q[B, H, S, D] and k[B, K, S, D], turned by the angles [S, D/2]."""
    names = call.names
    q, k = call.tensor("q"), call.tensor("k")
    for place in (0, 2, 3):
        names.unify(q[place], k[place])
    for name in ("cos", "sin"):
        angles = call.tensor(name)
        names.unify(q[2], angles[0])
        names.unify(angles[1], names.divided(q[3], 2))
    return [q, k]


# A pair takes four products and two sums.
own(
    "rotary(Tensor q, Tensor k, Tensor cos, Tensor sin, bool interleaved, bool backward) -> (Tensor, Tensor)",
    "pointwise",
    arithmetic=each(of_argument("q", "k"), 3),
    shapes=_shapes,
    dtypes=("q", "k"),
)
