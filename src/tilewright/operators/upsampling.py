"""Upsampling of the last two dimensions: by nearest neighbours where sizes are whole multiples, and gradients.

A gradient is a gather: each element sums the few results that read it, and nothing is scattered. Along one axis these
are neighbours; `passes/upsampling.py` takes the axes one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

from tilewright.operators.arithmetic import NOTHING, each, of_argument
from tilewright.operators.excerpt import excerpt, picked, positions, refuse_repeats, summed
from tilewright.operators.language import FLOATS, Unfusable, Value, call, where
from tilewright.operators.pieces import like_the_input
from tilewright.operators.row import Call, F, body
from tilewright.operators.shapes import kept

MOST_REPEATS = 25
"""An element that is repeated more often is left to PyTorch: each place is a load of its own in backward."""
MOST_READERS = 64
"""Results that may read an element: each is a load of its own. Bilinear by a factor of 32, bicubic of 16."""
Mode = Literal["nearest", "nearest-exact", "linear", "cubic"]
REACH = {"linear": 1, "cubic": 2}
"""A result reads the elements that lie nearer to it than this."""
CUBIC = -0.75
"""The coefficient of PyTorch's cubic convolution."""


def _factors(small: Sequence[int], large: Sequence[int], scales: Sequence[float | None]) -> tuple[int, int]:
    """How often each row and column is repeated. Raises `Unfusable` for other sizes and scales."""
    found = []
    for low, high, scale in zip(small[-2:], large[-2:], scales, strict=True):
        factor = high // low
        if high % low or (scale is not None and scale != factor):
            raise Unfusable("an upsampling that repeats some elements more often than others")
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
    """One axis of an upsampling from `size` elements to `places`: where each result lies among the elements.

    Result o lies at (o + ½) · step - ½, with `align_corners` and for `nearest` at o · step.
    """

    mode: Mode
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

    @property
    def shift(self) -> tuple[float, float]:
        """What is added to o before, and to the product after."""
        if self.align_corners or self.mode == "nearest":
            return 0.0, 0.0
        return 0.5, -0.5 if self.mode in REACH else 0.0

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
        before, after = self.shift
        if not self.step:
            return 0, self.places - 1
        reach = REACH.get(self.mode)
        low, high = (i, i + 1) if reach is None else (i - reach, i + reach)
        # Places are rounded to fp32, which decides between neighbours only for the nearest.
        early, late = (1e-9, -1e-9) if reach else (1e-6 * self.places, 1 + 1e-6 * self.places)
        first = math.ceil((low - after) / self.step - before - early) if i else 0
        last = math.ceil((high - after) / self.step - before + late) - 1 if i < self.size - 1 else self.places - 1
        return max(first, 0), min(last, self.places - 1)

    def ahead(self, k: int) -> float | None:
        """How far reader k of an element lies ahead of it, without the ends of the axis; None where that differs."""
        p, q, b, _ = self.readers
        if q > 1 or self.align_corners or self.scale not in (None, p):
            return None
        return (b + k + 0.5) / p - 0.5

    def neighbours(self, at: Value) -> Iterator[tuple[Value, Value | None]]:
        """Of results, by number: the elements that they read, and how much of each; None for all."""
        before, after = self.shift
        place = (at + before) * self.step + after
        near = call("floor", place)
        if self.mode not in REACH:
            yield call("minimum", near, self.size - 1), None
            return
        for offset, weight in zip((-1, 0, 1, 2), _cubic(place - near), strict=True):
            yield call("minimum", call("maximum", near + offset, 0), self.size - 1), weight


def _cubic(t: Value) -> tuple[Value, Value, Value, Value]:
    """How much of the four elements around a place counts, t after the second of them."""
    a = CUBIC

    def near(x: Value) -> Value:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Value) -> Value:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return far(t + 1), near(t), near(1 - t), far(2 - t)


def _along(c: Call, g: Value, dim: int, axis: Axis) -> Value:
    """The gradient of an upsampling along one axis: element i sums its part of the results that read it."""
    p, q, b, count = axis.readers
    if count > MOST_READERS:
        raise Unfusable(f"an element that more than {MOST_READERS} results read")
    refuse_repeats(g, count)
    element = positions(c.trace, axis.size, dim, len(g.dims))
    own = element.to_compute(g.dtype)
    # Divisions round towards 0: what is divided must not be negative.
    raised = max(-(b // q), 0)
    first = element * p + b if q == 1 else call("idiv", element * p + (b + raised * q), q) - raised
    shared = _linear if axis.mode == "linear" else _share

    def parts() -> Iterator[tuple[Value, Value]]:
        for k in range(count):
            place = first + k
            inside = (place >= 0) & (place < axis.places)
            part = excerpt(g, dim, axis.size, b + k, p, inside) if q == 1 else picked(g, dim, place, inside)
            reads, share = shared(axis, k, place.to_compute(g.dtype), own)
            yield part if share is None else part * share, inside if reads is None else inside & reads

    return summed(parts())


def _linear(axis: Axis, k: int, at: Value, own: Value) -> tuple[Value | None, Value | None]:
    """Whether readers k, by number, read the elements `own`, None for all, and by what factor.

    A result that lies d ahead of an element, within the ends of the axis, takes 1 - |d| of it; d is in [-1, 1).
    """
    known, (before, after) = axis.ahead(k), axis.shift
    ahead = (at + before) * axis.step + after - own if known is None else known
    ahead = call("maximum", call("minimum", (axis.size - 1) - own, ahead), -own)
    reads = None if known is not None and -1 <= known < 1 else (ahead >= -1) & (ahead < 1)
    return reads, 1 - call("abs", ahead)


def _share(axis: Axis, k: int, at: Value, own: Value) -> tuple[Value | None, Value | None]:
    """The same for the other modes; the factor is None for 1."""
    reads: Value | None = None
    share: Value | None = None
    for element, weight in axis.neighbours(at):
        hit = element.eq(own)
        reads = hit if reads is None else reads | hit
        if weight is not None:
            part = where(hit, weight, 0)
            share = part if share is None else share + part
    return reads, share


def _gradient(c: Call, g: Value, axes: Sequence[Axis]) -> Value:
    """Along the one axis that changes. Raises `Unfusable` if both do: an element has too many readers."""
    changing = [(dim, axis) for dim, axis in zip((-2, -1), axes, strict=True) if axis.changes]
    if len(changing) > 1:
        raise Unfusable("an upsampling along two axes at once")
    if g.dtype not in FLOATS:
        raise Unfusable("an upsampling of integers")
    for dim, axis in changing:
        g = _along(c, g, dim, axis)
    return g


def _by_place(text: str, flops: int) -> Callable[[F], F]:
    """Declare a gradient; `flops` are those of one result of the upsampling."""
    arithmetic = each(of_argument("grad_output"), flops)
    return body(text, arithmetic=arithmetic, promotion="none", shapes=like_the_input)


def _interpolated(name: str, mode: Mode, flops: int) -> None:
    @_by_place(f"{name}.default(grad_output, output_size, input_size, align_corners, scales_h, scales_w)", flops)
    def _(
        c: Call,
        g: Value,
        output_size: Sequence[int],
        input_size: Sequence[int],
        align_corners: bool,
        scales_h: float | None = None,
        scales_w: float | None = None,
    ) -> Value:
        return _gradient(c, g, _axes(mode, c.shape, g.shape, (scales_h, scales_w), align_corners))


_interpolated("upsample_bilinear2d_backward", "linear", 8)
_interpolated("upsample_bicubic2d_backward", "cubic", 32)


@_by_place("upsample_nearest2d_backward.default(grad_output, output_size, input_size, scales_h, scales_w)", 1)
def upsample_nearest2d_backward(
    c: Call,
    g: Value,
    output_size: Sequence[int],
    input_size: Sequence[int],
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    try:
        rows, columns = _factors(c.shape, g.shape, (scales_h, scales_w))
    except Unfusable:
        rows, columns = 0, 0
    if not 0 < rows * columns <= MOST_REPEATS:
        return _gradient(c, g, _axes("nearest", c.shape, g.shape, (scales_h, scales_w)))
    refuse_repeats(g, rows * columns)
    every = product(range(rows), range(columns))
    return summed((excerpt(excerpt(g, -2, c.shape[-2], i, rows), -1, c.shape[-1], j, columns), None) for i, j in every)


@_by_place("_upsample_nearest_exact2d_backward.default(grad_output, output_size, input_size, scales_h, scales_w)", 1)
def upsample_nearest_exact2d_backward(
    c: Call,
    g: Value,
    output_size: Sequence[int],
    input_size: Sequence[int],
    scales_h: float | None = None,
    scales_w: float | None = None,
) -> Value:
    return _gradient(c, g, _axes("nearest-exact", c.shape, g.shape, (scales_h, scales_w)))


def _axes(
    mode: Mode,
    small: Sequence[int],
    large: Sequence[int],
    scales: Sequence[float | None],
    align_corners: bool = False,
) -> list[Axis]:
    """Those of the last two dimensions."""
    ends = zip(small[-2:], large[-2:], scales, strict=True)
    return [Axis(mode, size, places, align_corners, scale) for size, places, scale in ends]
