"""Adaptive pooling of the last two or three dimensions, where all windows are of one size; forward and backward."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain

from tilewright.operators.language import FLOATS, Unfusable, Value, call, predicate, where
from tilewright.operators.pooling import EACH_ELEMENT, MOST_ELEMENTS, avg_pool, max_pool, of_windows, pools
from tilewright.operators.reduction import first_at
from tilewright.operators.row import Call
from tilewright.operators.shapes import like, pooled
from tilewright.operators.slice_value import positions


def _equal_windows(places: int, full: Sequence[int], windows: Sequence[int]) -> tuple[int, ...]:
    """The sizes of the windows of an adaptive pooling; raises `Unfusable` where they differ."""
    sizes = list(zip(full[-places:], windows[-places:], strict=True))
    if any(size % count for size, count in sizes):
        raise Unfusable("its windows differ in size")
    return tuple(size // count for size, count in sizes)


def _adaptive_avg_pool(places: int, c: Call, x: Value, output_size: Sequence[int]) -> Value:
    kernel = _equal_windows(places, x.shape, c.shape)
    if math.prod(kernel) <= MOST_ELEMENTS:
        return avg_pool(places, c, x, kernel)
    split = chain.from_iterable(zip(c.shape[-places:], kernel, strict=True))
    parts = x.view([*x.shape[:-places], *split])
    return (parts.sum(tuple(range(1 - 2 * places, 0, 2))) / math.prod(kernel)).view(c.shape)


pools(
    _adaptive_avg_pool,
    "_adaptive_avg_poolNd.default(self, output_size)",
    shapes=pooled,
    arithmetic=EACH_ELEMENT,
    dtypes=("self",),
)


def _own_windows(places: int, c: Call, g: Value) -> list[Value]:
    """The window of an adaptive pooling in which each element lies, `g` having an element for each window."""
    kernel, rank = _equal_windows(places, c.shape, g.shape), len(c.shape)
    return [
        call("idiv", positions(c.trace, c.shape[dim], dim, rank), size)
        for dim, size in zip(range(-places, 0), kernel, strict=True)
    ]


def _adaptive_avg_pool_backward(places: int, c: Call, g: Value, x: Value) -> Value:
    kernel = _equal_windows(places, c.shape, g.shape)
    return of_windows(g, _own_windows(places, c, g), None) / math.prod(kernel)


pools(
    _adaptive_avg_pool_backward,
    "_adaptive_avg_poolNd_backward.default(grad_output, self)",
    shapes=like("self"),
    arithmetic=EACH_ELEMENT,
    dtypes=("self",),
)


def _adaptive_max_pool(places: int, c: Call, x: Value, output_size: Sequence[int]) -> tuple[Value, Value]:
    """As `max_pool`; a window of more elements than it takes must be the whole plane."""
    kernel = _equal_windows(places, x.shape, output_size)
    if math.prod(kernel) <= MOST_ELEMENTS:
        return max_pool(places, c, x, kernel)
    if math.prod(output_size) > 1:
        raise Unfusable("its windows have too many elements")
    plane = x.view([*x.shape[:-places], math.prod(kernel)])
    best = plane.max(-1)
    place = first_at(plane, best, -1, True)
    if x.dtype in FLOATS:
        last = where(predicate("isnan", plane), plane.index(-1), -1).max(-1)
        place = where(last >= 0, last, place)
    return best.view(c.shape), place.view(c.shape)


pools(
    _adaptive_max_pool,
    "adaptive_max_poolNd.default(self, output_size)",
    shapes=pooled,
    arithmetic=EACH_ELEMENT,
    dtypes=("self", "int64"),
    discontinuous=True,
)


def _adaptive_max_pool_backward(places: int, c: Call, g: Value, x: Value, indices: Value) -> Value:
    """Each element has the gradient of its window if it is the window's largest."""
    windows, own = _own_windows(places, c, g), c.trace.const(0, "int64")
    for dim in range(-places, 0):
        own = own * c.shape[dim] + positions(c.trace, c.shape[dim], dim, len(c.shape))
    return where(of_windows(indices, windows, None).eq(own), of_windows(g, windows, None), 0)


pools(
    _adaptive_max_pool_backward,
    "adaptive_max_poolNd_backward.default(grad_output, self, indices)",
    shapes=like("self"),
    arithmetic=EACH_ELEMENT,
    dtypes=("self",),
    discontinuous=True,
)
