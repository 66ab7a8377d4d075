"""Sums of elements at computed places of each row: the gradient of a gather along the last dimension."""

from __future__ import annotations

from tilewright.operators.arithmetic import each, of_argument
from tilewright.operators.row import own
from tilewright.operators.shapes import CallAxes, Result


def _shapes(call: CallAxes) -> Result:
    extent = call.shape[-1] if call.known is not None else call.arguments["extent"]
    return call.tensor("source")[:-1] + call.names.unknown_shape([extent], guess=True)


own(
    "scatter_sums(Tensor source, Tensor index, SymInt extent) -> Tensor",
    "library",
    arithmetic=each(of_argument("source"), 1),
    shapes=_shapes,
    dtypes=("source",),
)
