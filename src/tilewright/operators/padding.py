"""Padding with what a tensor holds itself: its reflection at the edges, or the edges repeated; and the gradients.

`padding` is before and after the last dimension, then the one before it. A gradient is a gather: each element sums the
few results that read it, and nothing is scattered. PyTorch's kernels add with atomics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod

from tilewright.operators.arithmetic import NOTHING, each, of_argument
from tilewright.operators.language import Unfusable, Value, call
from tilewright.operators.row import Call, body
from tilewright.operators.shapes import kept, like
from tilewright.operators.slice_value import picked, positions, refuse_repeats, slice_value, summed

MOST_READERS = 27
"""Results that may read an element: each is a load of its own."""
Part = tuple[int, int, Value | None]
"""Elements start, start + step, … of a gradient, and where they count; None for everywhere."""


def _reflected(places: Value, extent: int) -> Value:
    """-2, -1, 0, 1, … → 2, 1, 0, 1, …, and back at the last element."""
    within = call("maximum", places, -places)
    beyond = (extent - 1) - within
    return (extent - 1) - call("maximum", beyond, -beyond)


def _repeated(places: Value, extent: int) -> Value:
    return call("minimum", call("maximum", places, 0), extent - 1)


def _readers_by_reflection(places: Value, extent: int, before: int, after: int) -> Iterator[Part]:
    yield before, 1, None
    if before:
        yield before, -1, (places >= 1) & (places <= before)
    if after:
        last = extent - 1
        yield before + 2 * last, -1, (places >= last - after) & (places < last)


def _readers_of_edges(places: Value, extent: int, before: int, after: int) -> Iterator[Part]:
    yield before, 1, None
    for k in range(before):
        yield k, 1, places.eq(0)
    for k in range(after):
        yield before + k + 1, 1, places.eq(extent - 1)


def _pads(
    name: str,
    axes: int,
    source: Callable[[Value, int], Value],
    readers: Callable[[Value, int, int, int], Iterator[Part]],
) -> None:
    """`<name><axes>d` and its gradient: `source` gives the element that is read at a place."""

    @body(f"{name}{axes}d.default(self, padding)", promotion="none", arithmetic=NOTHING, shapes=kept)
    def _(c: Call, x: Value, padding: Sequence[int]) -> Value:
        for dim, before, after in _by_axis(padding, len(x.dims)):
            places = positions(c.trace, x.shape[dim] + before + after, dim, len(x.dims)) - before
            x = picked(x, dim, source(places, x.shape[dim]))
        return x

    @body(
        f"{name}{axes}d_backward.default(grad_output, self, padding)",
        promotion="none",
        arithmetic=each(of_argument("grad_output"), 1),
        shapes=like("self"),
        dtypes=("self",),
    )
    def _(c: Call, g: Value, x: Value, padding: Sequence[int]) -> Value:
        rank = len(c.shape)
        if min(padding) < 0:
            raise Unfusable("its forward pads by a negative amount, which cuts elements off")
        along = [
            (dim, list(readers(positions(c.trace, c.shape[dim], dim, rank), c.shape[dim], before, after)))
            for dim, before, after in _by_axis(padding, rank)
        ]
        count = prod(len(parts) for _, parts in along)
        if count > MOST_READERS:
            raise Unfusable(f"an element that more than {MOST_READERS} results read")
        refuse_repeats(g, count, axes)
        for dim, parts in along:
            extent, whole = c.shape[dim], g
            g = summed((slice_value(whole, dim, extent, *part), part[-1]) for part in parts)
        return g


def _by_axis(padding: Sequence[int], rank: int) -> Iterator[tuple[int, int, int]]:
    """Dimension, and how many elements are added before and after."""
    for number in range(len(padding) // 2):
        yield rank - 1 - number, padding[2 * number], padding[2 * number + 1]


for _axes in (1, 2, 3):
    _pads("reflection_pad", _axes, _reflected, _readers_by_reflection)
    _pads("replication_pad", _axes, _repeated, _readers_of_edges)
