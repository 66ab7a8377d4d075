"""Sums of rows or elements at computed places along one dimension: the gradient of an index."""

from __future__ import annotations

from tilewright.operators.arithmetic import each, of_argument
from tilewright.operators.row import own
from tilewright.operators.shapes import CallAxes, Result


def _shapes(call: CallAxes) -> Result:
    extent = call.shape[1] if call.known is not None else call.arguments["extent"]
    source = call.tensor("source")
    return source[:1] + call.names.unknown_shape([extent], guess=True) + source[2:]


own(
    "index_sums(Tensor source, Tensor index, SymInt extent, bool wraps) -> Tensor",
    "library",
    arithmetic=each(of_argument("source"), 1),
    shapes=_shapes,
    dtypes=("float32",),
)
