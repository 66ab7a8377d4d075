"""New tokens into a static cache."""

from __future__ import annotations

from tilewright.operators.arithmetic import each, of_argument
from tilewright.operators.row import Traffic, own
from tilewright.operators.shapes import CallAxes, Result


def _shapes(call: CallAxes) -> Result:
    """The queries, turned; nothing where there are none."""
    return call.axes("q") or call.names.unknown_shape((0,))


# It writes as many elements into the caches as it reads of k and v, and the turned queries.
own(
    "write_cache_(Tensor(a!) keys, Tensor(b!) values, Tensor k, Tensor v, Tensor place, Tensor? q, Tensor? cos, "
    "Tensor? sin) -> Tensor",
    "pointwise",
    arithmetic=each(of_argument("k"), 3),
    traffic=Traffic(unread=("keys", "values"), written=of_argument("k", "v", "q")),
    shapes=_shapes,
    dtypes=("k",),
    priced=False,
)
