"""Upsampling of the last two dimensions: by nearest neighbours where sizes are whole multiples, and bilinear.

A gradient is a gather: each element sums the few results that read it, and nothing is scattered. Along one axis these
are neighbours; `passes/index/upsampling.py` takes the axes one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import product

from tilewright.operators.arithmetic import (
    NOTHING,
    Arithmetic,
    CallSizes,
    Count,
    each,
    elements,
    nothing,
    of_argument,
    wanted,
)
from tilewright.operators.concatenation import like_the_input
from tilewright.operators.language import FLOATS, Unfusable, Value, call
from tilewright.operators.row import Call, RowFields, body, calls
from tilewright.operators.shapes import kept
from tilewright.operators.slice_value import picked, positions, refuse_repeats, slice_value, summed

MOST_REPEATS = 25
"""An element that is repeated more often is left to PyTorch: each place is a load of its own in backward."""
MOST_READERS = 64
"""Results that may read an element: each is a load of its own. Bilinear by a factor of 32."""


def _factors(small: Sequence[int], large: Sequence[int], scales: Sequence[float | None]) -> tuple[int, int]:
    """How often each row and column is repeated. Raises `Unfusable` for other sizes and scales."""
    found = []
    for low, high, scale in zip(small[-2:], large[-2:], scales, strict=True):
        factor = high // low
        if high % low or (scale is not None and scale != factor):
            raise Unfusable("it repeats some elements more often than others")
        found.append(factor)
    return found[0], found[1]


@body(
    "upsample_nearest2d.default(self, output_size, scales_h, scales_w)",
    promotion="none",
    shapes=kept,
    arithmetic=NOTHING,
)
def upsample_nearest2d(
    c: Call, x: Value, output_size: Sequence[int], scales_h: float | None = None, scales_w: float | None = None
) -> Value:
    rank, factors = len(x.dims), _factors(x.shape, c.shape, (scales_h, scales_w))
    refuse_repeats(x, factors[0] * factors[1])
    for dim, factor in zip((-2, -1), factors, strict=True):
        if factor > 1:
            x = picked(x, dim, call("idiv", positions(c.trace, c.shape[dim], dim, rank), factor))
    return x


@dataclass(frozen=True)
class Axis:
    """One axis of a linear upsampling from `size` elements to `places`.

    Result o lies at (o + ½) · step - ½ among the elements, with `align_corners` at o · step. Those that lie nearer
    than 1 to an element read it.
    """

    size: int
    places: int
    align_corners: bool = False
    scale: float | None = None
    """The factor that the caller gave, where it gave one."""

    @property
    def changes(self) -> bool:
        return self.size != self.places or self.scale not in (None, 1.0)

    @property
    def step(self) -> float:
        if self.align_corners:
            return (self.size - 1) / (self.places - 1) if self.places > 1 else 0.0
        return 1 / self.scale if self.scale else self.size / self.places

    @cached_property
    def readers(self) -> tuple[int, int, int, int]:
        """p, q, b, n: the results that read element i are among the n from ⌊(i · p + b) / q⌋ on."""
        common = math.gcd(self.places, self.size)
        p, q = self.places // common, self.size // common
        spans = [(i, *self._span(i)) for i in range(self.size)]
        spans = [(i, first, last) for i, first, last in spans if first <= last]
        b = min((q * first + q - 1 - i * p for i, first, _ in spans), default=0)
        return p, q, b, max((last - (i * p + b) // q + 1 for i, _, last in spans), default=1)

    def _span(self, i: int) -> tuple[int, int]:
        """The first and the last result that may read element i."""
        if not self.step:
            return 0, self.places - 1
        shift = 0.0 if self.align_corners else 0.5
        before, behind = (math.ceil((i + d + shift) / self.step - shift - 1e-9) for d in (-1, 1))
        last = behind - 1 if i < self.size - 1 else self.places - 1
        return max(before if i else 0, 0), min(last, self.places - 1)

    def ahead(self, k: int) -> float | None:
        """Distance of reader k from its element, away from the ends of the axis; None if it varies with the element."""
        p, q, b, _ = self.readers
        if q > 1 or self.align_corners or self.scale not in (None, p):
            return None
        return (b + k + 0.5) / p - 0.5


def _along(c: Call, g: Value, dim: int, axis: Axis) -> Value:
    """The gradient of an upsampling along one axis: element i sums its part of the results that read it."""
    p, q, b, count = axis.readers
    if count > MOST_READERS:
        raise Unfusable(f"an element that more than {MOST_READERS} results read")
    refuse_repeats(g, count)
    element = positions(c.trace, axis.size, dim, len(g.dims))
    own = element.to_compute(g.dtype)
    # Integer division truncates: shift the dividend so that it is not negative.
    raised = max(-(b // q), 0)
    first = element * p + b if q == 1 else call("idiv", element * p + (b + raised * q), q) - raised

    def parts() -> Iterator[tuple[Value, Value]]:
        for k in range(count):
            place = first + k
            inside = (place >= 0) & (place < axis.places)
            part = slice_value(g, dim, axis.size, b + k, p, inside) if q == 1 else picked(g, dim, place, inside)
            reads, share = _share(axis, k, place.to_compute(g.dtype), own)
            yield part * share, inside if reads is None else inside & reads

    return summed(parts())


def _share(axis: Axis, k: int, at: Value, own: Value) -> tuple[Value | None, Value]:
    """Whether readers k, by number, read the elements `own`, None for all, and by what factor.

    A result that lies d ahead of an element, within the ends of the axis, takes 1 - |d| of it; d is in [-1, 1).
    """
    known = axis.ahead(k)
    place = at * axis.step if axis.align_corners else (at + 0.5) * axis.step - 0.5
    ahead = call("maximum", call("minimum", (axis.size - 1) - own, place - own if known is None else known), -own)
    reads = None if known is not None and -1 <= known < 1 else (ahead >= -1) & (ahead < 1)
    return reads, 1 - call("abs", ahead)


def _gradient(flops: int) -> RowFields:
    """Fields that the rows of gradients share; `flops` for each element of the incoming gradient."""
    return {"arithmetic": each(of_argument("grad_output"), flops), "promotion": "none", "shapes": like_the_input}


@body(
    "upsample_bilinear2d_backward.default(grad_output, output_size, input_size, align_corners, scales_h, scales_w)",
    **_gradient(8),
)
def upsample_bilinear2d_backward(
    c: Call,
    g: Value,
    output_size: Sequence[int],
    input_size: Sequence[int],
    align_corners: bool,
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    """Along the one axis that changes. Raises `Unfusable` if both do: an element has too many readers."""
    ends = zip(c.shape[-2:], g.shape[-2:], (scales_h, scales_w), strict=True)
    axes = [Axis(size, places, align_corners, scale) for size, places, scale in ends]
    if all(axis.changes for axis in axes):
        raise Unfusable("an upsampling along two axes at once")
    if g.dtype not in FLOATS:
        raise Unfusable("an upsampling of integers")
    for dim, axis in zip((-2, -1), axes, strict=True):
        g = _along(c, g, dim, axis) if axis.changes else g
    return g


@body("upsample_nearest2d_backward.default(grad_output, output_size, input_size, scales_h, scales_w)", **_gradient(1))
def upsample_nearest2d_backward(
    c: Call,
    g: Value,
    output_size: Sequence[int],
    input_size: Sequence[int],
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    rows, columns = _factors(c.shape, g.shape, (scales_h, scales_w))
    if rows * columns > MOST_REPEATS:
        raise Unfusable(f"elements that are repeated more than {MOST_REPEATS} times")
    refuse_repeats(g, rows * columns)
    every = product(range(rows), range(columns))
    return summed(
        (slice_value(slice_value(g, -2, c.shape[-2], i, rows), -1, c.shape[-1], j, columns), None) for i, j in every
    )


gradients = partial(calls, operator_class="library", shapes=like_the_input)
gradients(
    """
    upsample_linear1d_backward.default(grad_output, output_size, input_size, align_corners, scales)
    upsample_trilinear3d_backward.default(grad_output, output_size, input_size, align_corners, scales_d, scales_h,
        scales_w)
    """,
    arithmetic=each(of_argument("grad_output"), 8),
)
gradients(
    "upsample_bicubic2d_backward.default(grad_output, output_size, input_size, align_corners, scales_h, scales_w)",
    arithmetic=each(of_argument("grad_output"), 32),
)
gradients(
    """
    upsample_nearest1d_backward.default(grad_output, output_size, input_size, scales)
    upsample_nearest3d_backward.default(grad_output, output_size, input_size, scales_d, scales_h, scales_w)
    _upsample_nearest_exact1d_backward.default(grad_output, output_size, input_size, scales)
    _upsample_nearest_exact2d_backward.default(grad_output, output_size, input_size, scales_h, scales_w)
    _upsample_nearest_exact3d_backward.default(grad_output, output_size, input_size, scales_d, scales_h, scales_w)
    """,
    arithmetic=each(of_argument("grad_output"), 1),
)


def _neighbours(sizes: CallSizes) -> int:
    """The elements that each result reads: bilinear, nearest, bicubic."""
    axes = len(sizes.operand()) - 2
    return (2**axes, 1, 4**axes)[int(sizes.argument("interpolation_mode"))]  # type: ignore[call-overload]


def _sampled(sizes: CallSizes) -> Count:
    """A product and a sum for each neighbour of each result; nearest copies."""
    near = _neighbours(sizes)
    return 2 * near * elements(sizes.result()) if near > 1 else 0


def _sampled_backward(sizes: CallSizes) -> Count:
    """The same for the gradient of the input, to which nearest only adds, and for each axis of the grid's."""
    near, (of_input, of_grid) = _neighbours(sizes), wanted(sizes, 2)
    if near == 1:
        return of_input * elements(sizes.operand())
    return 2 * near * (of_input + of_grid * (len(sizes.operand()) - 2)) * elements(sizes.operand())


sampler = partial(calls, operator_class="library", shapes=None, discontinuous=True, priced=False)
for axes in (2, 3):
    arguments = "input, grid, interpolation_mode, padding_mode, align_corners"
    sampler(f"grid_sampler_{axes}d.default({arguments})", arithmetic=Arithmetic(_sampled, nothing))
    sampler(
        f"grid_sampler_{axes}d_backward.default(grad_output, {arguments}, output_mask)",
        arithmetic=Arithmetic(_sampled_backward, nothing),
    )
