"""Windows laid side by side, which may overlap, and the sums that undo it: `unfold`, `fold` and their gradients.

A sum is a gather: each element adds up the few windows that hold it, and nothing is scattered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from tilewright.operators.arithmetic import NOTHING, each, of_argument
from tilewright.operators.concatenation import like_the_input
from tilewright.operators.language import Unfusable, Value, call, where
from tilewright.operators.row import Call, body
from tilewright.operators.shapes import kept
from tilewright.operators.slice_value import picked, positions, refuse_repeats, slice_value, summed

MOST_WINDOWS = 25
"""Windows that may hold an element: each is a load of its own."""


@body("im2col.default(self, kernel_size, dilation, padding, stride)", promotion="none", arithmetic=NOTHING, shapes=kept)
def im2col(
    c: Call, x: Value, kernel: Sequence[int], dilation: Sequence[int], padding: Sequence[int], stride: Sequence[int]
) -> Value:
    """[N, C, H, W] → [N, C · kh · kw, windows]: element (i, j) of each window; zeros lie around the image."""
    x = x.unsqueeze(-3).unsqueeze(-3)
    rank = len(x.dims)
    for axis in range(2):
        extent, count = x.shape[axis - 2], _windows(x.shape[axis - 2], kernel, dilation, padding, stride, axis)
        inner = positions(c.trace, kernel[axis], axis - 4, rank) * dilation[axis]
        place = positions(c.trace, count, axis - 2, rank) * stride[axis] + inner - padding[axis]
        inside = (place >= 0) & (place < extent) if padding[axis] else None
        moved = picked(x, axis - 2, place, inside)
        x = moved if inside is None else where(inside, moved, 0)
    return x.view(c.shape)


@body(
    "col2im.default(self, output_size, kernel_size, dilation, padding, stride)",
    promotion="none",
    arithmetic=each(of_argument("self"), 1),
    shapes=kept,
)
def col2im(
    c: Call,
    x: Value,
    size: Sequence[int],
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
) -> Value:
    """[N, C · kh · kw, windows] → [N, C, H, W], each element the sum of its places in the windows."""
    counts = [_windows(size[axis], kernel, dilation, padding, stride, axis) for axis in range(2)]
    if kernel[0] * kernel[1] > MOST_WINDOWS:
        raise Unfusable(f"windows of more than {MOST_WINDOWS} elements")
    refuse_repeats(x, kernel[0] * kernel[1])
    apart = x.view([*c.shape[:-2], *kernel, *counts])
    rank = len(c.shape)

    def parts() -> Iterator[tuple[Value, Value | None]]:
        for inner in product(range(kernel[0]), range(kernel[1])):
            part = apart
            for axis in range(2):
                part = slice_value(part, axis - 4, 1, inner[axis])
            part, everywhere = part.squeeze([-4, -3]), None
            for axis in range(2):
                place = positions(c.trace, size[axis], axis - 2, rank) + (padding[axis] - inner[axis] * dilation[axis])
                number, inside = _window(place, stride[axis], counts[axis])
                part = picked(part, axis - 2, number, inside)
                everywhere = inside if everywhere is None else everywhere & inside
            yield part, everywhere

    return summed(parts())


def _windows(
    extent: int,
    kernel: Sequence[int],
    dilation: Sequence[int],
    padding: Sequence[int],
    stride: Sequence[int],
    axis: int,
) -> int:
    return (extent + 2 * padding[axis] - dilation[axis] * (kernel[axis] - 1) - 1) // stride[axis] + 1


def _window(start: Value, stride: int, count: int) -> tuple[Value, Value]:
    """The window that begins at `start`, and where there is one of `count`."""
    if stride == 1:
        return start, (start >= 0) & (start < count)
    number = call("idiv", start, stride)
    return number, (start >= 0) & (number < count) & (number * stride).eq(start)


@body(
    "unfold_backward.default(grad_in, input_sizes, dim, size, step)",
    promotion="none",
    arithmetic=each(of_argument("grad_in"), 1),
    shapes=like_the_input,
)
def unfold_backward(c: Call, g: Value, sizes: Sequence[int], dim: int, size: int, step: int) -> Value:
    """[…, windows, …, size] → […, n, …]: of `unfold`, which shows each window along a last dimension."""
    if not c.shape:
        raise Unfusable("it unfolds a tensor without dimensions")
    rank, at, readers = len(c.shape), dim % len(c.shape), -(-size // step)
    if readers > MOST_WINDOWS:
        raise Unfusable(f"an element that lies in more than {MOST_WINDOWS} windows")
    refuse_repeats(g, readers)
    place = positions(c.trace, c.shape[at], at, rank + 1)

    def parts() -> Iterator[tuple[Value, Value | None]]:
        for back in range(readers):
            window = call("idiv", place, step) - back
            inner = place - window * step
            inside = (window >= 0) & (window < g.shape[at]) & (inner < size)
            part = picked(picked(g, at, window, inside), -1, inner, inside)
            yield part.squeeze([-1]), inside.squeeze([-1])

    return summed(parts())
