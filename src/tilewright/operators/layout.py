"""Layout operators: the same elements under other indices. In a nest they cost nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

from tilewright.operators.arithmetic import NOTHING
from tilewright.operators.language import Value
from tilewright.operators.row import Body, Call, F, body, calls
from tilewright.operators.shapes import CallAxes, Result, Rule, same
from tilewright.operators.slice_value import bounds, slice_value

# How axes follow.


def _regrouped(call: CallAxes) -> Result:
    return call.names.regroup(call.operands[0], call.shape)


def _transposed(call: CallAxes) -> Result:
    axes = list(call.operands[0])
    if axes:
        a, b = call.dim(len(axes), "dim0"), call.dim(len(axes), "dim1")
        axes[a], axes[b] = axes[b], axes[a]
    return tuple(axes)


def _permuted(call: CallAxes) -> Result:
    return tuple(call.operands[0][place] for place in call.arguments["dims"])


def _expanded(call: CallAxes) -> Result:
    wanted = call.names.unknown_shape(call.shape, guess=True)
    source = call.operands[0]
    padded = ((),) * (len(wanted) - len(source)) + source
    sizes = zip(padded, wanted, call.shape, strict=True)
    return tuple(axis if call.names.size_of(axis) == size else new for axis, new, size in sizes)


def _unsqueezed(call: CallAxes) -> Result:
    axes = list(call.operands[0])
    axes.insert(call.dim(len(axes) + 1), ())
    return tuple(axes)


def _squeezed(call: CallAxes) -> Result:
    source = call.operands[0]
    places = call.dims(len(source)) if "dim" in call.arguments else range(len(source))
    return tuple(axis for i, axis in enumerate(source) if i not in places or call.names.size_of(axis) != 1)


def _sliced(call: CallAxes) -> Result:
    axes = list(call.operands[0])
    dim = call.dim(len(axes))
    axes[dim] = call.names.part(axes[dim], call.shape[dim])
    return tuple(axes)


def _split(call: CallAxes) -> Result:
    axes = call.operands[0]
    dim = call.dim(len(axes))
    sizes = [shape[dim] for shape in call.shapes if shape]
    return [(*axes[:dim], call.names.part(axes[dim], size), *axes[dim + 1 :]) for size in sizes]


def _selected(call: CallAxes) -> Result:
    axes = call.operands[0]
    dim = call.dim(len(axes))
    return call.each(axes[:dim] + axes[dim + 1 :])


def view_as(shapes: Rule, *texts: str) -> Callable[[F], F]:
    """Declare rows of operators that are views in a nest."""
    return body(*texts, operator_class="layout", promotion="none", arithmetic=NOTHING, shapes=shapes)


def relabel_as(shapes: Rule, *texts: str) -> Callable[[F], F]:
    """Declare rows of views that show all elements of their operand, from the first on."""
    return body(
        *texts, operator_class="layout", promotion="none", arithmetic=NOTHING, shapes=shapes, is_relabelled=True
    )


@relabel_as(_transposed, "transpose.int(self, dim0, dim1)")
def transpose(c: Call, x: Value, a: int, b: int) -> Value:
    order = list(range(len(x.dims)))
    if order:
        order[a], order[b] = order[b], order[a]
    return x.permute(order)


RELABELS: dict[tuple[str, ...], tuple[Rule, Body]] = {
    ("view.default(self, size)", "_unsafe_view.default(self, size)"): (_regrouped, lambda c, x, size: x.view(c.shape)),
    ("permute.default(self, dims)",): (_permuted, lambda c, x, dims: x.permute(dims)),
    ("t.default(self)",): (lambda call: call.operands[0][::-1], lambda c, x: x.permute([*range(len(x.dims))][::-1])),
    ("expand.default(self, size, implicit)",): (_expanded, lambda c, x, size, **_: x.expand(c.shape)),
    ("unsqueeze.default(self, dim)",): (_unsqueezed, lambda c, x, dim: x.unsqueeze(dim)),
    ("squeeze.dim(self, dim)",): (_squeezed, lambda c, x, dim: x.squeeze([dim])),
    ("squeeze.dims(self, dim)",): (_squeezed, lambda c, x, dim: x.squeeze(dim)),
    ("squeeze.default(self)",): (_squeezed, lambda c, x: x.squeeze(range(len(x.dims)))),
    ("alias.default(self)", "detach.default(self)"): (same, lambda c, x: x),
}
for texts, (shapes, formula) in RELABELS.items():
    relabel_as(shapes, *texts)(formula)
view_as(_regrouped, "reshape.default(self, shape)")(lambda c, x, shape: x.view(c.shape))
view_as(same, "lift_fresh_copy.default(self)")(lambda c, x: x)


# Parts: of a tensor in memory a view, of a computed value index arithmetic.


@view_as(_sliced, "slice.Tensor(self, dim, start, end, step)")
def slice_(c: Call, x: Value, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Value:
    if x.shape == c.shape:
        return x
    at = dim % len(x.dims)
    return slice_value(x, at, c.shape[at], bounds(x.shape[at], start, end)[0], step)


@view_as(_selected, "select.int(self, dim, index)")
def select(c: Call, x: Value, dim: int, index: int) -> Value:
    at = dim % len(x.dims)
    return slice_value(x, at, 1, index % x.shape[at]).squeeze([at])


@view_as(_selected, "unbind.int(self, dim)")
def unbind(c: Call, x: Value, dim: int = 0) -> tuple[Value, ...]:
    at = dim % len(x.dims)
    return tuple(slice_value(x, at, 1, index).squeeze([at]) for index in range(x.shape[at]))


def _parts(x: Value, sizes: Sequence[int], dim: int) -> tuple[Value, ...]:
    at = dim % len(x.dims)
    starts = accumulate(sizes, initial=0)
    return tuple(slice_value(x, at, size, start) for size, start in zip(sizes, starts, strict=False))


@view_as(_split, "split.Tensor(self, split_size, dim)", "unsafe_split.Tensor(self, split_size, dim)")
def split(c: Call, x: Value, size: int, dim: int = 0) -> tuple[Value, ...]:
    extent = x.shape[dim]
    return _parts(x, [min(size, extent - start) for start in range(0, extent, size)], dim)


@view_as(
    _split,
    "split_with_sizes.default(self, split_sizes, dim)",
    "unsafe_split_with_sizes.default(self, split_sizes, dim)",
)
def split_with_sizes(c: Call, x: Value, sizes: Sequence[int], dim: int = 0) -> tuple[Value, ...]:
    return _parts(x, sizes, dim)


@view_as(_sliced, "narrow.default(self, dim, start, length)")
def narrow(c: Call, x: Value, dim: int, start: int, length: int) -> Value:
    return slice_value(x, dim, length, start % max(x.shape[dim], 1))


# Views that only ever apply to a tensor in memory.

calls("chunk.default(self, chunks, dim)", "layout", shapes=_split)
calls("real.default(self)\nlift_fresh.default(self)", "layout", shapes=same)
calls(
    """
    diagonal.default(self, offset, dim1, dim2)
    as_strided.default(self, size, stride, storage_offset)
    unfold.default(self, dimension, size, step)
    view_as_real.default(self)
    view_as_complex.default(self)
    """,
    "layout",
    shapes=None,
)
# Another number is made of the bits: one rounding decides it.
calls("view.dtype(self, dtype)", "layout", shapes=None, discontinuous=True)
# Copies of views. Their axes are those of views without a body.
calls(
    """
    alias_copy.default(self)
    as_strided_copy.default(self, size, stride, storage_offset)
    diagonal_copy.default(self, offset, dim1, dim2)
    expand_copy.default(self, size, implicit)
    narrow_copy.default(self, dim, start, length)
    permute_copy.default(self, dims)
    split_with_sizes_copy.default(self, split_sizes, dim)
    squeeze_copy.default(self)
    t_copy.default(self)
    transpose_copy.int(self, dim0, dim1)
    unbind_copy.int(self, dim)
    unfold_copy.default(self, dimension, size, step)
    unsqueeze_copy.default(self, dim)
    view_copy.default(self, size)
    rot90.default(self, k, dims)
    """,
    "library",
    arithmetic=NOTHING,
    shapes=None,
    dtypes=("self",),
    priced=False,
)
