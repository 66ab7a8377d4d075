"""Pooling of the last two dimensions, those of an image, or three, those of a volume; forward and backward.

Forward reads each window's elements side by side; backward goes through the windows in which an input element lies:
neither needs atomics. Padding is read as masked loads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from itertools import product
from operator import mul
from typing import TypeVar, Unpack

from tilewright.operators.arithmetic import NOTHING, Arithmetic, CallSizes, Count, each, elements, nothing, of_argument
from tilewright.operators.language import FLOATS, Unfusable, Value, call, predicate, where
from tilewright.operators.row import Call, RowFields, body, calls
from tilewright.operators.shapes import like, pooled
from tilewright.operators.slice_value import picked, positions, refuse_repeats, slice_value, summed

N = TypeVar("N", int, Value)

MOST_ELEMENTS = 27
"""A window of more elements is left to PyTorch: each element is a load of its own."""
SMALLEST = {**{f"int{bits}": -(2 ** (bits - 1)) for bits in (8, 16, 32, 64)}, "uint8": 0}
OVERLAP = "windows overlap: PyTorch's own kernel is faster on a CPU"
"""Three times as fast for windows of 3 × 3 with a stride of 2, channels last; for windows side by side ours is."""


def _window_elements(places: int, sizes: CallSizes) -> Count:
    """One FLOP for each element of each window."""
    kernel = sizes.argument("kernel_size")
    assert isinstance(kernel, (int, list, tuple))
    windows = sizes.shape("grad_output")
    return elements(sizes.result() if windows is None else windows) * math.prod(_along(places, kernel))


EACH_ELEMENT = each(of_argument("self"), 1)


def pools(function: Callable[..., Value | tuple[Value, ...]], text: str, **says: Unpack[RowFields]) -> None:
    """Declare a row of images and one of volumes; the body's first argument is how many dimensions are places."""
    for places in (2, 3):
        each_window = Arithmetic(partial(_window_elements, places), nothing)
        fields: RowFields = {"promotion": "none", "arithmetic": each_window, **says}
        body(text.replace("Nd", f"{places}d"), operator_class="reduction", **fields)(partial(function, places))


def _along(places: int, numbers: Sequence[int] | int) -> tuple[int, ...]:
    """An argument that is one number, or one for each place."""
    listed = [numbers] if isinstance(numbers, int) else list(numbers)
    return tuple(listed * places if len(listed) == 1 else listed)


def _between(places: Value, low: int, high: int, *, least: int, most: int) -> Value | None:
    """Where low <= place < high, for places in [least, most]; None for everywhere."""
    above = places >= low if least < low else None
    below = places < high if most >= high else None
    return above & below if above is not None and below is not None else above if above is not None else below


def _both(a: Value | None, b: Value | None) -> Value | None:
    return b if a is None else a if b is None else a & b


@dataclass(frozen=True)
class _Axis:
    """The windows along one dimension: window w has the elements w · stride - pad + k · dilation, k < kernel."""

    dim: int
    size: int
    windows: int
    kernel: int
    stride: int
    pad: int
    dilation: int = 1

    @property
    def reach(self) -> int:
        """From the first element of a window to the one after its last."""
        return (self.kernel - 1) * self.dilation + 1

    @property
    def is_full(self) -> bool:
        """Whether no window reaches beyond the padding, and there is no room for another one."""
        return self.windows == (self.size + 2 * self.pad - self.reach) // self.stride + 1

    @property
    def overlap(self) -> int:
        """How many windows an element can lie in, without dilation."""
        return -(-self.reach // self.stride)

    def element(self, c: Call, rank: int, k: int) -> Value | None:
        """Where element k of each window is inside; None for everywhere."""
        first = k * self.dilation - self.pad
        places = positions(c.trace, self.windows, self.dim, rank) * self.stride + first
        last = (self.windows - 1) * self.stride
        if c.trace.of_any_size and self.is_full:
            last = self.size + 2 * self.pad - self.reach
        return _between(places, 0, self.size, least=first, most=last + first)

    def part(self, c: Call, x: Value, k: int) -> tuple[Value, Value | None]:
        """Element k of each window, and where it is inside."""
        inside = self.element(c, len(x.dims), k)
        start = k * self.dilation - self.pad
        return slice_value(x, self.dim, self.windows, start, self.stride, inside), inside

    def first(self, c: Call, rank: int) -> Value:
        """The first element of each window that is inside the operand, relative to the window's begin."""
        start = positions(c.trace, self.windows, self.dim, rank) * self.stride - self.pad
        steps = call("idiv", (self.dilation - 1) - start, self.dilation)
        return where(start < 0, steps * self.dilation, 0)

    def around(self, c: Call, rank: int, t: int) -> tuple[Value, Value | None]:
        """For each element, window number last - t of those it can lie in, and where that window exists."""
        last = call("idiv", positions(c.trace, self.size, self.dim, rank) + self.pad, self.stride)
        most = (self.size - 1 + self.pad) // self.stride
        if c.trace.of_any_size and self.is_full:
            most = self.windows - 1 - (1 + self.pad - self.reach) // self.stride
        places = last - t if t else last
        return places, _between(places, 0, self.windows, least=-t, most=most - t)

    def reaches(self, c: Call, rank: int, t: int) -> Value | None:
        """Where that window, of no dilation, has the element as its element place % stride + t · stride."""
        if (t + 1) * self.stride <= self.kernel:
            return None
        place = positions(c.trace, self.size, self.dim, rank) + self.pad
        within = place - call("idiv", place, self.stride) * self.stride
        return within < self.kernel - t * self.stride

    def count(self, windows: Value, with_padding: bool) -> Value:
        """How many elements `windows` have, those of the padding or those inside."""
        start = windows * self.stride - self.pad
        if with_padding:
            return call("minimum", start + self.kernel, self.size + self.pad) - start
        return call("minimum", start + self.kernel, self.size) - call("maximum", start, 0)

    def is_even(self, with_padding: bool) -> bool:
        """Whether all windows have `kernel` elements."""
        end = (self.windows - 1) * self.stride - self.pad + self.kernel
        return end <= self.size + (self.pad if with_padding else 0) and (with_padding or self.pad == 0)


def along_axes(
    c: Call,
    places: int,
    full: Sequence[int],
    windows: Sequence[int],
    kernel: Sequence[int] | int,
    stride: Sequence[int] | int,
    padding: Sequence[int] | int,
    dilation: Sequence[int] | int = 1,
) -> tuple[_Axis, ...]:
    """The last axes. Raises `Unfusable` for large windows, and on a CPU for windows that overlap."""
    sizes = _along(places, kernel)
    strides = _along(places, stride) if stride != [] and stride != () else sizes
    if math.prod(sizes) > MOST_ELEMENTS:
        raise Unfusable(f"a window of more than {MOST_ELEMENTS} elements")
    if c.in_cpp and any(size > step for size, step in zip(sizes, strides, strict=True)):
        raise Unfusable(OVERLAP)
    pads, steps = _along(places, padding), _along(places, dilation)
    return tuple(
        _Axis(dim - places, full[dim - places], windows[dim - places], *numbers)
        for dim, numbers in enumerate(zip(sizes, strides, pads, steps, strict=True))
    )


def _parts(c: Call, x: Value, axes: Sequence[_Axis]) -> Iterator[tuple[tuple[int, ...], Value, Value | None]]:
    """For each place in a window: the place, its element in all windows, and whether it is inside the operand."""
    if not axes:
        yield (), x, None
        return
    for k in range(axes[0].kernel):
        line, inside = axes[0].part(c, x, k)
        for place, value, beside in _parts(c, line, axes[1:]):
            yield (k, *place), value, _both(inside, beside)


def elements_of_windows(
    c: Call, x: Value, axes: Sequence[_Axis]
) -> Iterator[tuple[tuple[int, ...], Value, Value | None]]:
    refuse_repeats(x, math.prod(axis.kernel for axis in axes), len(axes))
    return _parts(c, x, axes)


def _flat(axes: Sequence[_Axis], places: Iterable[N]) -> N:
    """A position in the plane or volume."""
    first, *others = zip(axes, places, strict=True)
    return reduce(lambda position, at: position * at[0].size + at[1], others, first[1])


def max_pool(
    places: int, c: Call, x: Value, kernel: Sequence[int], stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0, dilation: Sequence[int] | int = 1, ceil_mode: bool = False,
) -> tuple[Value, Value]:  # fmt: skip
    """The first largest element of each window and its position in the plane; of several NaN the last."""
    axes = along_axes(c, places, x.shape, c.shape, kernel, stride, padding, dilation)
    rank = len(x.dims)
    best = smallest = x.trace.const(SMALLEST.get(x.dtype, -math.inf), x.dtype)
    offset = _flat(axes, (axis.first(c, rank) for axis in axes))
    for place, value, inside in elements_of_windows(c, x, axes):
        larger = value > best
        if x.dtype in FLOATS:
            larger = larger | predicate("isnan", value)
        if inside is not None:
            larger = larger & inside
        # A GPU takes the larger of two in one instruction; the comparisons are for the position, if it is wanted.
        beside = value if inside is None else where(inside, value, smallest)
        best = where(larger, value, best) if c.in_cpp else call("maximum", best, beside)
        here = _flat(axes, (k * axis.dilation for k, axis in zip(place, axes, strict=True)))
        offset = where(larger, here, offset)
    begin = _flat(axes, (positions(c.trace, axis.windows, axis.dim, rank) * axis.stride - axis.pad for axis in axes))
    return best, begin + offset


pools(
    max_pool,
    "max_poolNd_with_indices.default(self, kernel_size, stride, padding, dilation, ceil_mode)",
    shapes=pooled,
    dtypes=("self", "int64"),
    discontinuous=True,
)


def _around(
    c: Call, rank: int, axes: Sequence[_Axis], *, known: bool
) -> Iterator[tuple[tuple[Value, ...], Value | None]]:
    """For all elements, the windows in which they can lie: their numbers, and where that window exists.

    `known`: what a window gives says of which element it is, so that elements between windows need no check.
    """
    if math.prod(axis.overlap for axis in axes) > MOST_ELEMENTS:
        raise Unfusable(f"an element lies in more than {MOST_ELEMENTS} windows")
    for numbers in product(*(reversed(range(axis.overlap)) for axis in axes)):
        found = [axis.around(c, rank, t) for axis, t in zip(axes, numbers, strict=True)]
        inside = [exists for _, exists in found]
        if not known:
            inside += [axis.reaches(c, rank, t) for axis, t in zip(axes, numbers, strict=True)]
        yield tuple(window for window, _ in found), reduce(_both, inside)


def of_windows(g: Value, windows: Sequence[Value], inside: Value | None) -> Value:
    """The elements of `g` for these windows; the condition belongs to the last dimension."""
    for back, window in enumerate(windows):
        is_last = back == len(windows) - 1
        g = picked(g, back - len(windows), window, inside if is_last else None)
    return g


def _max_pool_backward(
    places: int, c: Call, g: Value, x: Value, kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int] | int, dilation: Sequence[int] | int, ceil_mode: bool, indices: Value,
) -> Value:  # fmt: skip
    """Each element sums the gradients of the windows whose largest element it is."""
    axes = along_axes(c, places, c.shape, g.shape, kernel, stride, padding, dilation)
    rank = len(c.shape)
    for operand in (g, indices):
        refuse_repeats(operand, math.prod(axis.overlap for axis in axes), places)
    own = _flat(axes, (positions(c.trace, axis.size, axis.dim, rank) for axis in axes))

    def parts() -> Iterator[tuple[Value, Value]]:
        for windows, inside in _around(c, rank, axes, known=True):
            hit = of_windows(indices, windows, inside).eq(own)
            hit = hit if inside is None else hit & inside
            yield of_windows(g, windows, inside), hit

    return summed(parts())


pools(
    _max_pool_backward,
    "max_poolNd_with_indices_backward.default(grad_output, self, kernel_size, stride, padding, dilation, "
    "ceil_mode, indices)",
    shapes=like("self"),
    arithmetic=each(of_argument("grad_output"), 1),
    dtypes=("self",),
)


def _divisor(
    axes: Sequence[_Axis], windows: Sequence[Value], with_padding: bool, override: int | None, dtype: str
) -> Value | int:
    """The divisor of the windows' sums."""
    if override is not None:
        return override
    if all(axis.is_even(with_padding) for axis in axes):
        return math.prod(axis.kernel for axis in axes)
    counts = (axis.count(window, with_padding) for axis, window in zip(axes, windows, strict=True))
    return reduce(mul, counts).to_compute(dtype)


def avg_pool(
    places: int, c: Call, x: Value, kernel: Sequence[int], stride: Sequence[int] = (),
    padding: Sequence[int] | int = 0, ceil_mode: bool = False, count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Value:  # fmt: skip
    if x.dtype not in FLOATS:
        raise Unfusable("an average of integers")
    axes = along_axes(c, places, x.shape, c.shape, kernel, stride, padding)
    total = summed((value, inside) for _, value, inside in elements_of_windows(c, x, axes))
    windows = [positions(c.trace, axis.windows, axis.dim, len(x.dims)) for axis in axes]
    return total / _divisor(axes, windows, count_include_pad, divisor_override, x.dtype)


pools(
    avg_pool,
    "avg_poolNd.default(self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)",
    shapes=pooled,
    dtypes=("self",),
)


def _avg_pool_backward(
    places: int, c: Call, g: Value, x: Value, kernel: Sequence[int], stride: Sequence[int],
    padding: Sequence[int] | int, ceil_mode: bool, count_include_pad: bool, divisor_override: int | None,
) -> Value:  # fmt: skip
    if x.dtype not in FLOATS:
        raise Unfusable("an average of integers")
    axes = along_axes(c, places, c.shape, g.shape, kernel, stride, padding)
    refuse_repeats(g, math.prod(axis.overlap for axis in axes), places)

    def parts() -> Iterator[tuple[Value, Value | None]]:
        for windows, inside in _around(c, len(c.shape), axes, known=False):
            divisor = _divisor(axes, windows, count_include_pad, divisor_override, g.dtype)
            yield of_windows(g, windows, inside) / divisor, inside

    return summed(parts())


pools(
    _avg_pool_backward,
    "avg_poolNd_backward.default(grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, "
    "divisor_override)",
    shapes=like("self"),
    dtypes=("self",),
)
calls(
    """
    max_unpool2d.default(self, indices, output_size)
    max_unpool3d.default(self, indices, output_size, stride, padding)
    """,
    "library",
    arithmetic=NOTHING,
    shapes=None,
    dtypes=("self",),
)
