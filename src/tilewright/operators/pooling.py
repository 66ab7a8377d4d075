"""Pooling of the last two dimensions, forward and backward.

Forward reads each window's elements side by side; backward goes through the windows in which an input element lies:
neither needs atomics. Padding is read as masked loads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, each, elements, nothing, of_argument
from tilewright.operators.excerpt import excerpt, picked, positions, refuse_repeats, summed
from tilewright.operators.language import FLOATS, Unfusable, Value, call, predicate, where
from tilewright.operators.row import Call, body
from tilewright.operators.shapes import like, pooled

MOST_ELEMENTS = 25
"""A window of more elements is left to PyTorch: each element is a load of its own."""
SMALLEST = {**{f"int{bits}": -(2 ** (bits - 1)) for bits in (8, 16, 32, 64)}, "uint8": 0}
OVERLAP = "windows overlap: PyTorch's own kernel is faster on a CPU"
"""Three times as fast for windows of 3 × 3 with a stride of 2, channels last; for windows side by side ours is."""


def _window_elements(sizes: CallSizes) -> Count:
    """One FLOP for each element of each window."""
    kernel = sizes.argument("kernel_size")
    assert isinstance(kernel, (int, list, tuple))
    windows = sizes.shape("grad_output")
    return elements(sizes.result() if windows is None else windows) * math.prod(_pair(kernel))


EACH_WINDOW, EACH_ELEMENT = Arithmetic(_window_elements, nothing), each(of_argument("self"), 1)


pools = partial(body, operator_class="reduction", promotion="none")


def _pair(numbers: Sequence[int] | int) -> tuple[int, int]:
    if isinstance(numbers, int):
        return numbers, numbers
    return (numbers[0], numbers[-1])


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
    def overlap(self) -> int:
        """How many windows an element can lie in, without dilation."""
        return -(-self.reach // self.stride)

    def element(self, c: Call, rank: int, k: int) -> Value | None:
        """Where element k of each window is inside; None for everywhere."""
        first = k * self.dilation - self.pad
        places = positions(c.trace, self.windows, self.dim, rank) * self.stride + first
        return _between(places, 0, self.size, least=first, most=(self.windows - 1) * self.stride + first)

    def part(self, c: Call, x: Value, k: int) -> tuple[Value, Value | None]:
        """Element k of each window, and where it is inside."""
        inside = self.element(c, len(x.dims), k)
        start = k * self.dilation - self.pad
        return excerpt(x, self.dim, self.windows, start, self.stride, inside), inside

    def first(self, c: Call, rank: int) -> Value:
        """Of each window, the first element that is inside, relative to the window's begin."""
        start = positions(c.trace, self.windows, self.dim, rank) * self.stride - self.pad
        steps = call("idiv", (self.dilation - 1) - start, self.dilation)
        return where(start < 0, steps * self.dilation, 0)

    def around(self, c: Call, rank: int, t: int) -> tuple[Value, Value | None]:
        """For each element, window number last - t of those it can lie in, and where that window exists."""
        last = call("idiv", positions(c.trace, self.size, self.dim, rank) + self.pad, self.stride)
        most = (self.size - 1 + self.pad) // self.stride - t
        places = last - t if t else last
        return places, _between(places, 0, self.windows, least=-t, most=most)

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


def _axes(
    c: Call,
    full: Sequence[int],
    windows: Sequence[int],
    kernel: Sequence[int] | int,
    stride: Sequence[int] | int,
    padding: Sequence[int] | int,
    dilation: Sequence[int] | int = 1,
) -> tuple[_Axis, _Axis]:
    """The axes of height and width. Raises `Unfusable` for large windows, and on a CPU for windows that overlap."""
    sizes, strides = _pair(kernel), _pair(stride if stride != [] and stride != () else kernel)
    if math.prod(sizes) > MOST_ELEMENTS:
        raise Unfusable(f"a window of more than {MOST_ELEMENTS} elements")
    if c.in_cpp and any(size > step for size, step in zip(sizes, strides, strict=True)):
        raise Unfusable(OVERLAP)
    pads, steps = _pair(padding), _pair(dilation)
    high, wide = (_Axis(d, full[d], windows[d], sizes[d], strides[d], pads[d], steps[d]) for d in (-2, -1))
    return high, wide


def _elements(c: Call, x: Value, axes: tuple[_Axis, _Axis]) -> Iterator[tuple[int, int, Value, Value | None]]:
    """Of all windows: row and column in the window, that element, and where it is inside."""
    high, wide = axes
    refuse_repeats(x, high.kernel * wide.kernel)
    for i in range(high.kernel):
        line, above = high.part(c, x, i)
        for j in range(wide.kernel):
            value, beside = wide.part(c, line, j)
            yield i, j, value, _both(above, beside)


@pools(
    "max_pool2d_with_indices.default(self, kernel_size, stride, padding, dilation, ceil_mode)",
    shapes=pooled,
    arithmetic=EACH_WINDOW,
    dtypes=("self", "int64"),
    discontinuous=True,
)
def max_pool2d(
    c: Call, x: Value, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] | int = 0,
    dilation: Sequence[int] | int = 1, ceil_mode: bool = False,
) -> tuple[Value, Value]:  # fmt: skip
    """The first largest element of each window and its position in the plane; of several NaN the last."""
    high, wide = axes = _axes(c, x.shape, c.shape, kernel, stride, padding, dilation)
    rank = len(x.dims)
    best = x.trace.const(SMALLEST.get(x.dtype, -math.inf), x.dtype)
    offset = high.first(c, rank) * wide.size + wide.first(c, rank)
    for i, j, value, inside in _elements(c, x, axes):
        larger = value > best
        if x.dtype in FLOATS:
            larger = larger | predicate("isnan", value)
        if inside is not None:
            larger = larger & inside
        best = where(larger, value, best)
        offset = where(larger, (i * high.dilation) * wide.size + j * wide.dilation, offset)
    begin = [positions(c.trace, axis.windows, axis.dim, rank) * axis.stride - axis.pad for axis in axes]
    return best, begin[0] * wide.size + begin[1] + offset


def _around(
    c: Call, rank: int, axes: tuple[_Axis, _Axis], *, known: bool
) -> Iterator[tuple[Value, Value, Value | None]]:
    """For all elements, the windows in which they can lie: row, column, and where that window exists.

    `known`: what a window gives says of which element it is, so that elements between windows need no check.
    """
    high, wide = axes
    if high.overlap * wide.overlap > MOST_ELEMENTS:
        raise Unfusable(f"an element lies in more than {MOST_ELEMENTS} windows")
    for t, u in product(reversed(range(high.overlap)), reversed(range(wide.overlap))):
        row, above = high.around(c, rank, t)
        column, beside = wide.around(c, rank, u)
        if not known:
            above, beside = _both(above, high.reaches(c, rank, t)), _both(beside, wide.reaches(c, rank, u))
        yield row, column, _both(above, beside)


def _window(g: Value, row: Value, column: Value, inside: Value | None) -> Value:
    return picked(picked(g, -2, row), -1, column, inside)


@pools(
    "max_pool2d_with_indices_backward.default(grad_output, self, kernel_size, stride, padding, dilation, "
    "ceil_mode, indices)",
    shapes=like("self"),
    arithmetic=each(of_argument("grad_output"), 1),
    dtypes=("self",),
)
def max_pool2d_backward(
    c: Call, g: Value, x: Value, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int] | int,
    dilation: Sequence[int] | int, ceil_mode: bool, indices: Value,
) -> Value:  # fmt: skip
    """Each element sums the gradients of the windows whose largest element it is."""
    high, wide = axes = _axes(c, c.shape, g.shape, kernel, stride, padding, dilation)
    rank = len(c.shape)
    for operand in (g, indices):
        refuse_repeats(operand, high.overlap * wide.overlap)
    own = positions(c.trace, high.size, -2, rank) * wide.size + positions(c.trace, wide.size, -1, rank)

    def parts() -> Iterator[tuple[Value, Value]]:
        for row, column, inside in _around(c, rank, axes, known=True):
            hit = _window(indices, row, column, inside).eq(own)
            hit = hit if inside is None else hit & inside
            yield _window(g, row, column, inside), hit

    return summed(parts())


def _divisor(
    axes: tuple[_Axis, _Axis], row: Value, column: Value, with_padding: bool, override: int | None, dtype: str
) -> Value | int:
    """Of windows, by what their sum is divided."""
    if override is not None:
        return override
    if all(axis.is_even(with_padding) for axis in axes):
        return axes[0].kernel * axes[1].kernel
    return (axes[0].count(row, with_padding) * axes[1].count(column, with_padding)).to_compute(dtype)


@pools(
    "avg_pool2d.default(self, kernel_size, stride, padding, ceil_mode, count_include_pad, divisor_override)",
    shapes=pooled,
    arithmetic=EACH_WINDOW,
    dtypes=("self",),
)
def avg_pool2d(
    c: Call, x: Value, kernel: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] | int = 0,
    ceil_mode: bool = False, count_include_pad: bool = True, divisor_override: int | None = None,
) -> Value:  # fmt: skip
    if x.dtype not in FLOATS:
        raise Unfusable("an average of integers")
    axes = _axes(c, x.shape, c.shape, kernel, stride, padding)
    total = summed((value, inside) for _, _, value, inside in _elements(c, x, axes))
    row, column = (positions(c.trace, axis.windows, axis.dim, len(x.dims)) for axis in axes)
    return total / _divisor(axes, row, column, count_include_pad, divisor_override, x.dtype)


@pools(
    "avg_pool2d_backward.default(grad_output, self, kernel_size, stride, padding, ceil_mode, count_include_pad, "
    "divisor_override)",
    shapes=like("self"),
    arithmetic=EACH_WINDOW,
    dtypes=("self",),
)
def avg_pool2d_backward(
    c: Call, g: Value, x: Value, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int] | int,
    ceil_mode: bool, count_include_pad: bool, divisor_override: int | None,
) -> Value:  # fmt: skip
    if x.dtype not in FLOATS:
        raise Unfusable("an average of integers")
    high, wide = axes = _axes(c, c.shape, g.shape, kernel, stride, padding)
    rank = len(c.shape)
    refuse_repeats(g, high.overlap * wide.overlap)

    def parts() -> Iterator[tuple[Value, Value | None]]:
        for row, column, inside in _around(c, rank, axes, known=False):
            divisor = _divisor(axes, row, column, count_include_pad, divisor_override, g.dtype)
            yield _window(g, row, column, inside) / divisor, inside

    return summed(parts())


def _equal_windows(full: Sequence[int], windows: Sequence[int]) -> tuple[int, int]:
    """Height and width of the windows of an adaptive pooling; raises `Unfusable` where they differ in size."""
    sizes = list(zip(full[-2:], windows[-2:], strict=True))
    if any(size % count for size, count in sizes):
        raise Unfusable("windows of different sizes")
    height, width = (size // count for size, count in sizes)
    return height, width


@pools("_adaptive_avg_pool2d.default(self, output_size)", shapes=pooled, arithmetic=EACH_ELEMENT, dtypes=("self",))
def adaptive_avg_pool2d(c: Call, x: Value, output_size: Sequence[int]) -> Value:
    height, width = kernel = _equal_windows(x.shape, c.shape)
    if math.prod(kernel) <= MOST_ELEMENTS:
        return avg_pool2d(c, x, kernel)
    parts = x.view([*x.shape[:-2], c.shape[-2], height, c.shape[-1], width])
    return (parts.sum((-3, -1)) / math.prod(kernel)).view(c.shape)


@pools(
    "_adaptive_avg_pool2d_backward.default(grad_output, self)",
    shapes=like("self"),
    arithmetic=EACH_ELEMENT,
    dtypes=("self",),
)
def adaptive_avg_pool2d_backward(c: Call, g: Value, x: Value) -> Value:
    kernel, rank = _equal_windows(c.shape, g.shape), len(c.shape)
    row, column = (
        call("idiv", positions(c.trace, c.shape[dim], dim, rank), size)
        for dim, size in zip((-2, -1), kernel, strict=True)
    )
    return _window(g, row, column, None) / math.prod(kernel)
