"""Sums of rows or elements at computed places along one dimension: the gradient of an index."""

from __future__ import annotations

from tilewright.operators.arithmetic import CallSizes, Count, each, elements, of_argument
from tilewright.operators.row import Traffic, own
from tilewright.operators.shapes import CallAxes, Result


def _shapes(call: CallAxes) -> Result:
    extent = call.shape[1] if call.known is not None else call.arguments["extent"]
    source = call.tensor("source")
    return source[:1] + call.names.unknown_shape([extent], guess=True) + source[2:]


def _sums(sizes: CallSizes) -> Count:
    return elements(sizes.result())


# Zeros are written first; an addition reads and writes the sum it adds to, once if the cache holds it.
own(
    "index_sums(Tensor source, Tensor index, SymInt extent, bool wraps) -> Tensor",
    "library",
    arithmetic=each(of_argument("source"), 1),
    traffic=Traffic(between=(_sums, _sums)),
    shapes=_shapes,
    dtypes=("float32",),
)
