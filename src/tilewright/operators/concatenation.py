"""Concatenation, padding, gradients of parts, flips, repetition, triangles: index arithmetic and selections."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tilewright.operators.arithmetic import NOTHING
from tilewright.operators.language import Scalar, Unfusable, Value, call, where
from tilewright.operators.row import Call, F, body
from tilewright.operators.shapes import CallAxes, Result, Rule, kept, same
from tilewright.operators.slice_value import bounds, picked, positions, slice_value


def moves(text: str, shapes: Rule) -> Callable[[F], F]:
    """Declare a row that is a fill and copies where PyTorch runs it, which a profiler records in its place."""
    return body(text, promotion="none", arithmetic=NOTHING, shapes=shapes, priced=False)


def _places(c: Call, dim: int) -> Value:
    """The positions along `dim` of the result."""
    return positions(c.trace, c.shape[dim], dim, len(c.shape))


MOST_PARTS = 16
"""Each element tests every part for its place; beyond this PyTorch's copies, one for each part, are faster."""


def beside(c: Call, parts: Sequence[Value], dim: int) -> Value:
    """Parts one after the other along `dim`; raises `Unfusable` for more than `MOST_PARTS`."""
    if len(parts) > MOST_PARTS:
        raise Unfusable(f"a concatenation of more than {MOST_PARTS} parts")
    places, start = _places(c, dim), c.shape[dim]
    result: Value | None = None
    for part in reversed(parts):
        end, start = start, start - part.shape[dim]
        inside = _within(places, start, end, c.shape[dim])
        moved = slice_value(part.to_compute(c.dtype), dim, c.shape[dim], -start, inside=inside)
        result = moved if result is None else where(places < end, moved, result)
    assert result is not None
    return result


def _within(places: Value, start: int, end: int, extent: int) -> Value | None:
    """Where `start <= place < end`; None for everywhere."""
    if start <= 0:
        return None if end >= extent else places < end
    return places >= start if end >= extent else (places >= start) & (places < end)


def _cat_shapes(call: CallAxes) -> Result:
    parts = call.list_of("tensors")
    rank = max(map(len, parts), default=0)
    # PyTorch lets an empty vector of any rank join in.
    parts = [axes for axes in parts if len(axes) == rank]
    dim = call.dim(rank)
    result = list(call.broadcast(*((*axes[:dim], (), *axes[dim + 1 :]) for axes in parts)))
    result[dim] = call.names.concatenated([axes[dim] for axes in parts])
    return tuple(result)


@body("cat.default(tensors, dim)", promotion="none", arithmetic=NOTHING, shapes=_cat_shapes)
def cat(c: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    return beside(c, [part for part in tensors if part.shape != (0,)], dim % len(c.shape))


def _stack_shapes(call: CallAxes) -> Result:
    parts = call.list_of("tensors")
    together = list(call.broadcast(*parts))
    together.insert(call.dim(len(together) + 1), call.names.unknown(len(parts)))
    return tuple(together)


@moves("stack.default(tensors, dim)", _stack_shapes)
def stack(c: Call, tensors: Sequence[Value], dim: int = 0) -> Value:
    at = dim % len(c.shape)
    return beside(c, [part.unsqueeze(at) for part in tensors], at)


def like_the_input(call: CallAxes) -> Result:
    """The gradient of a part: an axis that the call was given keeps its name, the others wait for one."""
    source = call.operands[0]
    return call.kept(source) if len(source) == len(call.shape) else call.names.unknown_shape(call.shape)


def _surrounded(c: Call, x: Value, dim: int, start: int, value: Value | Scalar, step: int = 1) -> Value:
    """`x` at `start`, `start + step`, … along `dim` of a result that is `value` elsewhere."""
    places, count = _places(c, dim), x.shape[dim]
    inside = _within(places, start, start + (count - 1) * step + 1, c.shape[dim])
    if step != 1:
        number = call("idiv", places - start, step)
        met = (number * step).eq(places - start)
        inside = met if inside is None else met & inside
        return where(inside, picked(x, dim, number, inside), value)
    if inside is None:
        return x
    return where(inside, slice_value(x, dim, c.shape[dim], -start, inside=inside), value)


@moves("slice_backward.default(grad_output, input_sizes, dim, start, end, step)", like_the_input)
def slice_backward(
    c: Call, g: Value, sizes: Sequence[int], dim: int, start: int | None, end: int | None, step: int
) -> Value:
    at = dim % len(c.shape)
    return _surrounded(c, g, at, bounds(c.shape[at], start, end)[0], 0, step)


@moves("select_backward.default(grad_output, input_sizes, dim, index)", like_the_input)
def select_backward(c: Call, g: Value, sizes: Sequence[int], dim: int, index: int) -> Value:
    at = dim % len(c.shape)
    place = _places(c, at)
    return where(place.eq(index % c.shape[at]), g.unsqueeze(at), 0)


@moves("constant_pad_nd.default(self, pad, value)", kept)
def constant_pad_nd(c: Call, x: Value, pad: Sequence[int], value: Scalar = 0) -> Value:
    """`pad` is before and after the last dimension, then the one before it; a negative one cuts off."""
    rank = len(c.shape)
    for number in range(len(pad) // 2):
        dim, before, after = rank - 1 - number, pad[2 * number], pad[2 * number + 1]
        cut = x.shape[dim] + min(before, 0) + min(after, 0)
        if cut != x.shape[dim]:
            x = slice_value(x, dim, cut, max(-before, 0))
        x = _surrounded(c, x, dim, max(before, 0), value)
    return x


@body("flip.default(self, dims)", shapes=same, promotion="none", arithmetic=NOTHING)
def flip(c: Call, x: Value, dims: Sequence[int]) -> Value:
    for dim in {dim % len(c.shape) for dim in dims} if c.shape else ():
        x = slice_value(x, dim, x.shape[dim], x.shape[dim] - 1, -1)
    return x


@body("roll.default(self, shifts, dims)", shapes=same, promotion="none", arithmetic=NOTHING)
def roll(c: Call, x: Value, shifts: Sequence[int], dims: Sequence[int] = ()) -> Value:
    if not dims:
        raise Unfusable("it rolls the tensor as one flat row")
    for shift, dim in zip(shifts, dims, strict=True):
        at = dim % len(c.shape)
        moved = shift % c.shape[at]
        if moved:
            rest = c.shape[at] - moved
            x = beside(c, [slice_value(x, at, moved, rest), slice_value(x, at, rest, 0)], at)
    return x


@moves("repeat.default(self, repeats)", kept)
def repeat(c: Call, x: Value, repeats: Sequence[int]) -> Value:
    sizes = [1] * (len(repeats) - len(x.dims)) + list(x.shape)
    apart = x.view([extent for size in sizes for extent in (1, size)])
    return apart.expand([extent for pair in zip(repeats, sizes, strict=True) for extent in pair]).view(c.shape)


@moves("pixel_shuffle.default(self, upscale_factor)", kept)
def pixel_shuffle(c: Call, x: Value, factor: int) -> Value:
    """[…, C · r², H, W] → […, C, H · r, W · r] (Shi et al., arXiv:1609.05158)."""
    *batch, channels, height, width = x.shape
    apart = x.view([*batch, channels // factor**2, factor, factor, height, width])
    lead = list(range(len(batch) + 1))
    return apart.permute([*lead, *(len(lead) + place for place in (2, 0, 3, 1))]).view(c.shape)


@moves("pixel_unshuffle.default(self, downscale_factor)", kept)
def pixel_unshuffle(c: Call, x: Value, factor: int) -> Value:
    """The inverse of `pixel_shuffle`."""
    *batch, channels, height, width = x.shape
    apart = x.view([*batch, channels, height // factor, factor, width // factor, factor])
    lead = list(range(len(batch) + 1))
    return apart.permute([*lead, *(len(lead) + place for place in (1, 3, 0, 2))]).view(c.shape)


def _triangle(name: str, upper: bool) -> None:
    @body(f"{name}.default(self, diagonal)", shapes=same, promotion="none", arithmetic=NOTHING)
    def _(c: Call, x: Value, diagonal: int = 0) -> Value:
        away = x.index(-1) - x.index(-2)
        return where(away >= diagonal if upper else away <= diagonal, x, 0)


_triangle("tril", upper=False)
_triangle("triu", upper=True)


@moves("slice_scatter.default(self, src, dim, start, end, step)", same)
def slice_scatter(
    c: Call, x: Value, source: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Value:
    """`x` with `source` in the place of a slice."""
    at = dim % len(c.shape)
    return _surrounded(c, source.to_compute(c.dtype), at, bounds(c.shape[at], start, end)[0], x, step)


@moves("select_scatter.default(self, src, dim, index)", same)
def select_scatter(c: Call, x: Value, source: Value, dim: int, index: int) -> Value:
    at = dim % len(c.shape)
    return where(_places(c, at).eq(index % c.shape[at]), source.to_compute(c.dtype).unsqueeze(at), x)


def _on_diagonal(c: Call, source: Value, offset: int, dim1: int, dim2: int, elsewhere: Value | Scalar) -> Value:
    """[…, L] on the diagonal of `dim1` and `dim2` of a result that is `elsewhere` beside it."""
    rank, length = len(c.shape), source.shape[-1]
    first, second = dim1 % rank, dim2 % rank
    row, column = max(-offset, 0), max(offset, 0)
    # […, L] → the diagonal along the one dimension, one element along the other.
    rest = iter(range(rank - 2))
    order = [rank - 2 if d == first else rank - 1 if d == second else next(rest) for d in range(rank)]
    source = source.unsqueeze(-1).permute(order)
    rows, columns = _places(c, first), _places(c, second)
    inside = _within(rows, row, row + length, c.shape[first])
    if inside is not None:
        source = slice_value(source, first, c.shape[first], -row, inside=inside)
    # No column is equal to a row that the diagonal does not meet.
    return where((rows - row).eq(columns - column), source, elsewhere)


@moves("diagonal_scatter.default(self, src, offset, dim1, dim2)", same)
def diagonal_scatter(c: Call, x: Value, source: Value, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Value:
    return _on_diagonal(c, source.to_compute(c.dtype), offset, dim1, dim2, x)


@moves("diagonal_backward.default(grad_output, input_sizes, offset, dim1, dim2)", like_the_input)
def diagonal_backward(c: Call, g: Value, sizes: Sequence[int], offset: int, dim1: int, dim2: int) -> Value:
    return _on_diagonal(c, g, offset, dim1, dim2, 0)


@moves("diag_embed.default(self, offset, dim1, dim2)", like_the_input)
def diag_embed(c: Call, x: Value, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Value:
    return _on_diagonal(c, x, offset, dim1, dim2, 0)
