"""Elements at given places: embeddings, gathers, selections by index. An index outside fails as PyTorch's does.

A kernel reads the indices and, of the tensor, the elements that they name. Indices whose range is known, as after a
clamp, are not checked.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from math import prod

from tilewright.operators.arithmetic import NOTHING, Arithmetic, CallSizes, Count, elements, nothing, of_result
from tilewright.operators.axes import size
from tilewright.operators.language import Unfusable, Value, broadcast, where
from tilewright.operators.ranges import STORED, range_of
from tilewright.operators.row import Call, Traffic, body, calls
from tilewright.operators.shapes import CallAxes, Result, like
from tilewright.operators.slice_value import picked, refuse_repeats, slice_value


def rows_of_weight(sizes: CallSizes) -> Count:
    """Elements of the rows that the argument `indices` takes from a table."""
    weight = sizes.shape("weight")
    return elements(sizes.shape("indices")) * elements(weight[1:] if weight else ())


def _index_select(call: CallAxes) -> Result:
    axes = call.tensor("self")
    dim = call.dim(len(axes))
    return axes[:dim] + call.tensor("index") + axes[dim + 1 :]


def _index(call: CallAxes) -> Result:
    """The indexed axes become those of the indices: in place where they are neighbours, else in front."""
    axes, indices = call.tensor("self"), call.arguments["indices"]
    assert isinstance(indices, Sequence)
    places = [place for place, given in enumerate(indices) if given is not None]
    found = call.broadcast(*call.list_of("indices"))
    start = places[0] if places[-1] - places[0] + 1 == len(places) else 0
    rest = tuple(axis for place, axis in enumerate(axes) if place not in places)
    return rest[:start] + found + rest[start:]


def _place(index: Value, extent: int, *, wraps: bool, checks: bool = True) -> Value:
    """A place in [0, extent); with `wraps` a negative index counts from the end."""
    index = index.to_compute("int64")
    least, most = range_of(index) or STORED["int64"]
    if wraps and least < 0:
        index = where(index < 0, index + extent, index)
        least = 0 if least >= -extent else least
    # Positions that one size counts lie in a table, and those of another may not.
    inside = least >= 0 and most < extent and not (index.trace.of_any_size and most > 0)
    return index.checked(extent) if checks and not inside else index


def _picked(x: Value, dim: int, place: Value) -> Value:
    """`picked`, which drops the place in a dimension of one element and its check with it."""
    if x.shape[dim] > 1 or x.trace.ops[place.id].name != "check":
        return picked(x, dim, place)
    only = picked(x, dim, place)
    return where(place.eq(0), only, only)


def _at(x: Value, indices: Sequence[Value | None], *, wraps: bool = False, checks: bool = True) -> Value:
    """x[indices]: new dimensions where the indexed ones were if those are neighbours, else in front."""
    places = [place for place, index in enumerate(indices) if index is not None]
    found = [index for index in indices if index is not None]
    if any(index.dtype in ("bool", "uint8") for index in found):
        raise Unfusable("a selection by a mask")
    start = places[0] if places[-1] - places[0] + 1 == len(places) else 0
    kept = [d for d in range(len(x.dims)) if d not in places]
    # [kept…, indexed…] → [kept…, 1 for each dimension of the indices, kept…, indexed…]
    x = x.permute([*kept, *places])
    shape = broadcast(*(index.dims for index in found))
    readers = prod(map(size, shape)) // max(prod(x.shape[len(kept) :]), 1)
    refuse_repeats(x, 2, len(places), readers=readers)
    for _ in shape:
        x = x.unsqueeze(start)
    first, behind = len(kept) + len(shape), len(kept) - start + len(found)
    for number, index in enumerate(found):
        place = _place(index, x.shape[first + number], wraps=wraps, checks=checks)
        wide = [1] * (len(shape) - len(index.dims)) + list(index.shape)
        x = _picked(x, first + number, place.view([*[1] * start, *wide, *[1] * behind]))
    return x.squeeze([first + number for number in range(len(found))])


gathers = partial(
    body, promotion="none", arithmetic=NOTHING, traffic=Traffic(gathered={"self": of_result}), dtypes=("self",)
)


@gathers("_unsafe_index.Tensor(self, indices)", shapes=_index)
def unsafe_index(c: Call, x: Value, indices: Sequence[Value | None]) -> Value:
    """Elements at indices that are known to be inside, as decompositions compute them."""
    return _at(x, indices, wraps=True, checks=False)


@gathers("index.Tensor(self, indices)", shapes=_index, priced=False)
def index_tensor(c: Call, x: Value, indices: Sequence[Value | None]) -> Value:
    return _at(x, indices, wraps=True)


@body(
    "embedding.default(weight, indices, padding_idx, scale_grad_by_freq, sparse)",
    promotion="none",
    arithmetic=NOTHING,
    shapes=lambda call: call.tensor("indices") + call.tensor("weight")[1:],
    dtypes=("weight",),
    traffic=Traffic(gathered={"weight": rows_of_weight}),
)
def embedding(c: Call, weight: Value, indices: Value, *_options: object, **_named: object) -> Value:
    """Rows of a table; its options are of the gradient."""
    return _at(weight, [indices])


@gathers("index_select.default(self, dim, index)", shapes=_index_select)
def index_select(c: Call, x: Value, dim: int, index: Value) -> Value:
    if not x.dims:
        raise Unfusable("a selection from a tensor without dimensions")
    return _at(x, [*[None] * (dim % len(x.dims)), index if index.dims else index.unsqueeze(0)])


@gathers("gather.default(self, dim, index, sparse_grad)", shapes=like("index"))
def gather(c: Call, x: Value, dim: int, index: Value, *_options: object, **_named: object) -> Value:
    """out[i, j] = x[i, index[i, j]] along `dim`; along the others x may be longer than the index."""
    if not x.dims or not index.dims:
        raise Unfusable("a gather without dimensions")
    at = dim % len(x.dims)
    refuse_repeats(x.permute([*(d for d in range(len(x.dims)) if d != at), at]), 2, 1)
    for d, extent in enumerate(index.shape):
        if d != at and extent < x.shape[d]:
            x = slice_value(x, d, extent, 0)
    return _picked(x, at, _place(index, x.shape[at], wraps=False))


calls(
    "take.default(self, index)",
    "library",
    arithmetic=NOTHING,
    shapes=like("index"),
    dtypes=("self",),
    traffic=Traffic(gathered={"self": of_result}),
)
calls(
    "_embedding_bag.default(weight, indices, offsets, scale_grad_by_freq, mode, sparse, per_sample_weights, "
    "include_last_offset, padding_idx)",
    "library",
    arithmetic=Arithmetic(rows_of_weight, nothing),
    shapes=None,
    traffic=Traffic(gathered={"weight": rows_of_weight}),
    priced=False,
)
