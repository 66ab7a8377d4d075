"""Gathers, scatters, sorts and copies: calls of a library, but for gathers whose indices need no check."""

from __future__ import annotations

from collections.abc import Sequence

from tilewright.operators.arithmetic import (
    NOTHING,
    CallSizes,
    Count,
    each,
    elements,
    of_argument,
    of_result,
    per_operand,
)
from tilewright.operators.excerpt import picked, refuse_repeats
from tilewright.operators.language import Unfusable, Value, broadcast, where
from tilewright.operators.pieces import like_the_input
from tilewright.operators.row import Call, Traffic, body, calls
from tilewright.operators.shapes import CallAxes, Result, factory, kept, like, no_result, same


def rows_of_weight(sizes: CallSizes) -> Count:
    """Elements of the rows that the argument `indices` takes from a table."""
    weight = sizes.shape("weight")
    return elements(sizes.shape("indices")) * elements(weight[1:] if weight else ())


def embedding_shapes(call: CallAxes) -> Result:
    return call.tensor("indices") + call.tensor("weight")[1:]


def table_gradient(rows: str, gradient: str, call: CallAxes) -> Result:
    """The gradient of a table whose number of rows is the argument `rows`."""
    entries = call.shape[0] if call.known is not None else call.arguments[rows]
    return call.names.unknown_shape([entries], guess=True) + call.tensor(gradient)[-1:]


def _embedding_backward(call: CallAxes) -> Result:
    return table_gradient("num_weights", "grad_output", call)


calls(
    "embedding.default(weight, indices, padding_idx, scale_grad_by_freq, sparse)",
    "library",
    arithmetic=NOTHING,
    shapes=embedding_shapes,
    dtypes=("weight",),
    traffic=Traffic(gathered={"weight": rows_of_weight}),
)
calls(
    "embedding_dense_backward.default(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)",
    "library",
    arithmetic=per_operand(1),
    shapes=_embedding_backward,
    dtypes=("grad_output",),
)


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


GATHERED = Traffic(gathered={"self": of_result})
calls(
    "index_select.default(self, dim, index)",
    "library",
    arithmetic=NOTHING,
    shapes=_index_select,
    dtypes=("self",),
    traffic=GATHERED,
)
calls(
    "gather.default(self, dim, index, sparse_grad)",
    "library",
    arithmetic=NOTHING,
    shapes=like("index"),
    dtypes=("self",),
    traffic=GATHERED,
)
calls(
    "index.Tensor(self, indices)",
    "library",
    arithmetic=NOTHING,
    shapes=_index,
    dtypes=("self",),
    traffic=GATHERED,
    priced=False,
)


@body(
    "_unsafe_index.Tensor(self, indices)",
    promotion="none",
    arithmetic=NOTHING,
    shapes=_index,
    dtypes=("self",),
    traffic=GATHERED,
)
def unsafe_index(c: Call, x: Value, indices: Sequence[Value | None]) -> Value:
    """Elements at indices that are known to be inside, as decompositions compute them."""
    places = [place for place, index in enumerate(indices) if index is not None]
    first, last = places[0], places[-1]
    if last - first + 1 != len(places):
        raise Unfusable("indices of dimensions that are no neighbours")
    found = [index for index in indices if index is not None]
    if any(index.dtype == "bool" for index in found):
        raise Unfusable("a selection by a mask")
    shape = broadcast(*(index.dims for index in found))
    refuse_repeats(x, 2)
    # […, indexed, …] → […, 1 for each dimension of the result, indexed, …]; what is indexed goes at the end.
    behind = len(x.dims) - 1 - last
    for _ in shape:
        x = x.unsqueeze(first)
    for number, index in enumerate(found):
        at = first + len(shape) + number
        index = where(index < 0, index + x.shape[at], index).to_compute("int64")
        wide = [1] * (len(shape) - len(index.dims)) + list(index.shape)
        x = picked(x, at, index.view([*[1] * first, *wide, *[1] * (len(found) + behind)]))
    return x.squeeze([first + len(shape) + number for number in range(len(found))])


calls(
    "index_put.default(self, indices, values, accumulate)",
    "library",
    arithmetic=NOTHING,
    shapes=same,
    dtypes=("self",),
    priced=False,
)
# What is written is as large as the values, unless they broadcast over the indices.
calls(
    "index_put_.default(self, indices, values, accumulate)",
    "library",
    pure=False,
    arithmetic=NOTHING,
    shapes=same,
    dtypes=("self",),
    traffic=Traffic(unread=("self",), written=of_argument("values")),
    priced=False,
)
calls(
    "index_copy.default(self, dim, index, source)",
    "library",
    arithmetic=NOTHING,
    shapes=same,
    dtypes=("self",),
    priced=False,
)
calls(
    "index_copy_.default(self, dim, index, source)",
    "library",
    pure=False,
    arithmetic=NOTHING,
    shapes=same,
    dtypes=("self",),
    traffic=Traffic(unread=("self",), written=of_argument("source")),
    priced=False,
)
calls(
    "scatter_add.default(self, dim, index, src)",
    "library",
    arithmetic=each(of_argument("src"), 1),
    shapes=same,
    dtypes=("self",),
    priced=False,
)


calls(
    "value_selecting_reduction_backward.default(grad, dim, indices, sizes, keepdim)",
    "library",
    arithmetic=NOTHING,
    shapes=like_the_input,
    priced=False,
)
calls(
    "cumsum.default(self, dim, dtype)\ncumprod.default(self, dim, dtype)",
    "library",
    arithmetic=per_operand(1),
    shapes=same,
)
calls("sort.default(self, dim, descending)", "library", shapes=same, dtypes=("self", "int64"))
calls("topk.default(self, k, dim, largest, sorted)", "library", shapes=kept, dtypes=("self", "int64"))


# Of a loss that is picked out of each row, and its gradient.


def _nll_loss(call: CallAxes) -> Result:
    return [call.tensor("target") if call.arguments.get("reduction") == 0 else (), ()]


def _nll_loss_backward(call: CallAxes) -> Result:
    return call.tensor("self")


TARGETS = of_argument("target")
calls(
    "nll_loss_forward.default(self, target, weight, reduction, ignore_index)",
    "library",
    arithmetic=each(TARGETS, 1),
    shapes=_nll_loss,
    dtypes=("self", "self"),
    traffic=Traffic(gathered={"self": TARGETS}),
)
calls(
    "nll_loss_backward.default(grad_output, self, target, weight, reduction, ignore_index, total_weight)",
    "library",
    arithmetic=each(TARGETS, 1),
    shapes=_nll_loss_backward,
    dtypes=("self",),
    traffic=Traffic(unread=("self",)),
)


# Copies, memory without values, and one element read by the host.


def _copied(call: CallAxes) -> Result:
    return call.broadcast(call.tensor("self"), call.tensor("src"))


OVERWRITTEN = Traffic(unread=("self",))
calls(
    "copy.default(self, src, non_blocking)",
    "library",
    arithmetic=NOTHING,
    shapes=_copied,
    dtypes=("self",),
    traffic=OVERWRITTEN,
)
calls(
    "copy_.default(self, src, non_blocking)",
    "library",
    pure=False,
    arithmetic=NOTHING,
    shapes=_copied,
    dtypes=("self",),
    traffic=OVERWRITTEN,
)
calls(
    """
    empty.memory_format(size, ...)
    new_empty.default(self, size, ...)
    new_empty_strided.default(self, size, stride, ...)
    """,
    "library",
    arithmetic=NOTHING,
    shapes=factory,
    traffic=Traffic(unread=("*",), reserves=True),
    priced=False,
)
calls(
    "empty_like.default(self, ...)",
    "library",
    arithmetic=NOTHING,
    shapes=same,
    traffic=Traffic(unread=("*",), reserves=True),
    priced=False,
)
calls(
    "_local_scalar_dense.default(self)",
    "library",
    arithmetic=NOTHING,
    shapes=no_result,
    traffic=Traffic(gathered={"self": lambda _: 1}),
)
