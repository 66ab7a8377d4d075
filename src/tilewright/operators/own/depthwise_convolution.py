"""Convolutions of each channel with a window of its own."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, elements, nothing
from tilewright.operators.language import Value
from tilewright.operators.pooling import along_axes, elements_of_windows
from tilewright.operators.row import Call, own
from tilewright.operators.shapes import CallAxes, Result, windows
from tilewright.operators.slice_value import slice_value, summed


def _flops(sizes: CallSizes) -> Count:
    weight = sizes.shape("weight")
    assert weight is not None
    return 2 * elements(sizes.result()) * elements(weight[1:])


def _shapes(call: CallAxes) -> Result:
    source, weight = call.tensor("x"), call.tensor("weight")
    for axis in weight[2:]:
        call.names.unify(axis, call.names.number(call.names.size_of(axis)))
    if call.known is not None:
        return call.kept(source[:2] + call.names.unknown_shape(call.shape[2:]))
    kernel = [call.names.size_of(axis) for axis in weight[2:]]
    return (*source[:2], *call.names.unknown_shape(windows(call, source, kernel)))


def _depthwise_convolution(
    c: Call, x: Value, weight: Value, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Value:
    """Each place of a window is a load of its own, as in pooling."""
    places = len(x.dims) - 2
    kernel = weight.shape[2:]
    axes = along_axes(c, places, x.shape, c.shape, kernel, stride, padding, dilation)

    def at(place: tuple[int, ...]) -> Value:
        """[C, 1, …], which broadcasts against x."""
        found = weight
        for dim, k in enumerate(place):
            found = slice_value(found, 2 + dim, 1, k)
        return found.view((weight.shape[0], *[1] * places))

    return summed((value * at(place), inside) for place, value, inside in elements_of_windows(c, x, axes))


own(
    "depthwise_convolution(Tensor x, Tensor weight, int[] stride, int[] padding, int[] dilation) -> Tensor",
    "reduction",
    _depthwise_convolution,
    promotion="none",
    arithmetic=Arithmetic(_flops, nothing),
    shapes=_shapes,
    dtypes=("x",),
)
