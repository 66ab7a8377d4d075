"""Scatters, gradients of gathers, sorts, copies and conditions: calls of a library, but for a scatter of one slice."""

from __future__ import annotations

from functools import partial
from math import prod

from tilewright.operators.arithmetic import (
    NOTHING,
    Arithmetic,
    CallSizes,
    Count,
    each,
    elements,
    nothing,
    of_argument,
    per_operand,
)
from tilewright.operators.concatenation import like_the_input
from tilewright.operators.creation import over_self
from tilewright.operators.language import Scalar, Unfusable, Value, where
from tilewright.operators.row import Call, Traffic, body, calls
from tilewright.operators.shapes import CallAxes, Result, factory, kept, like, no_result, reduction, same


def table_gradient(rows: str, gradient: str, call: CallAxes) -> Result:
    """The gradient of a table whose number of rows is the argument `rows`."""
    entries = call.shape[0] if call.known is not None else call.arguments[rows]
    return call.names.unknown_shape([entries], guess=True) + call.tensor(gradient)[-1:]


calls(
    "embedding_dense_backward.default(grad_output, indices, num_weights, padding_idx, scale_grad_by_freq)",
    "library",
    arithmetic=per_operand(1),
    shapes=partial(table_gradient, "num_weights", "grad_output"),
    dtypes=("grad_output",),
)


at_places = partial(calls, operator_class="library", shapes=same, dtypes=("self",), priced=False)
at_places("index_put.default(self, indices, values, accumulate)", arithmetic=NOTHING)
# As many elements are written as there are values, unless the values broadcast over the indices.
at_places(
    "index_put_.default(self, indices, values, accumulate)",
    arithmetic=NOTHING,
    traffic=Traffic(unread=("self",), written=of_argument("values")),
)
at_places(
    "index_copy_.default(self, dim, index, source)",
    arithmetic=NOTHING,
    traffic=Traffic(unread=("self",), written=of_argument("source")),
)
at_places(
    "index_add_.default(self, dim, index, source, alpha)",
    arithmetic=each(of_argument("source"), 1),
    traffic=Traffic(gathered={"self": of_argument("source")}, written=of_argument("source")),
)
at_places("put.default(self, index, source, accumulate)", arithmetic=NOTHING)
at_places("as_strided_scatter.default(self, src, size, stride, storage_offset)", arithmetic=NOTHING)
at_places(
    "index_fill.int_Scalar(self, dim, index, value)\nindex_fill.int_Tensor(self, dim, index, value)", arithmetic=NOTHING
)
at_places("scatter_add.default(self, dim, index, src)", arithmetic=each(of_argument("src"), 1))
# The gradients of extremes compare the operands with the result.
at_places(
    "scatter_reduce.two(self, dim, index, src, reduce, include_self)\n"
    "index_reduce.default(self, dim, index, source, reduce, include_self)",
    arithmetic=per_operand(1),
    discontinuous=True,
)


one_slice = partial(body, promotion="none", shapes=same, dtypes=("self",), priced=False)


def _is_at(x: Value, dim: int, index: Value) -> Value:
    """Whether an element is in the slice along `dim` that the only element of `index` names."""
    if not x.dims or prod(index.shape) != 1:
        raise Unfusable("it scatters more than one element along the axis")
    return x.index(dim).eq(index.to_compute("int64").checked(x.shape[dim]).view([1] * len(x.dims)))


@one_slice("index_copy.default(self, dim, index, source)", arithmetic=NOTHING)
def index_copy(c: Call, x: Value, dim: int, index: Value, source: Value) -> Value:
    return where(_is_at(x, dim, index), source, x)


@one_slice("index_add.default(self, dim, index, source, alpha)", arithmetic=each(of_argument("source"), 1))
def index_add(c: Call, x: Value, dim: int, index: Value, source: Value, alpha: Scalar = 1) -> Value:
    return where(_is_at(x, dim, index), x + (source if alpha == 1 else source * alpha), x)


calls(
    "trace.default(self)",
    "library",
    arithmetic=each(lambda sizes: min(map(sizes.only_number, sizes.operand())), 1),
    shapes=lambda _: (),
    priced=False,
)
# How many there are depends on data: what they move has no formula.
calls("nonzero.default(self)", "library", shapes=None, priced=False)
calls("masked_select.default(self, mask)", "library", shapes=None, priced=False)
calls("masked_scatter.default(self, mask, source)", "library", shapes=same, dtypes=("self",), priced=False)

calls(
    "value_selecting_reduction_backward.default(grad, dim, indices, sizes, keepdim)",
    "library",
    arithmetic=NOTHING,
    shapes=like_the_input,
    priced=False,
)
calls(
    """
    sort.default(self, dim, descending)
    sort.stable(self, stable, dim, descending)
    """,
    "library",
    shapes=same,
    dtypes=("self", "int64"),
    discontinuous=True,
)
calls("logcumsumexp.default(self, dim)", "library", arithmetic=per_operand(2, 2), shapes=same)
calls(
    "cummax.default(self, dim)\ncummin.default(self, dim)",
    "library",
    arithmetic=per_operand(1),
    shapes=same,
    dtypes=("self", "int64"),
    discontinuous=True,
)
# One element of each row and its place, and of all elements. A selection compares each element at least once.
of_rows = partial(
    calls, operator_class="library", shapes=reduction, dtypes=("self", "int64"), discontinuous=True, priced=False
)
of_rows("mode.default(self, dim, keepdim)")
of_rows(
    """
    kthvalue.default(self, k, dim, keepdim)
    median.dim(self, dim, keepdim)
    nanmedian.dim(self, dim, keepdim)
    """,
    arithmetic=per_operand(1),
)
calls(
    "median.default(self)\nnanmedian.default(self)",
    "library",
    arithmetic=per_operand(1),
    shapes=reduction,
    dtypes=("self",),
    discontinuous=True,
    priced=False,
)


def _halvings(sorted_among: str, sizes: CallSizes) -> Count:
    """The comparisons of a binary search for each element of `self`, which may be a number."""
    found, sought = sizes.shape(sorted_among), sizes.shape("self")
    assert found is not None
    return max(sizes.only_number(found[-1]) - 1, 0).bit_length() * elements(() if sought is None else sought)


# Where an element stands, or whether, in others.
searches = partial(calls, operator_class="library", dtypes=("int64",), discontinuous=True, priced=False)
for name, arguments, among in (
    ("bucketize", "self, boundaries, out_int32, right", "boundaries"),
    ("searchsorted", "sorted_sequence, self, out_int32, right, side, sorter", "sorted_sequence"),
):
    halvings = Arithmetic(partial(_halvings, among), nothing)
    searches(f"{name}.Tensor({arguments})", shapes=like("self"), arithmetic=halvings)
    searches(f"{name}.Scalar({arguments})", shapes=lambda _: (), arithmetic=halvings)
calls(
    """
    isin.Tensor_Tensor(elements, test_elements, assume_unique, invert)
    isin.Tensor_Scalar(elements, test_element, assume_unique, invert)
    """,
    "library",
    shapes=like("elements"),
    dtypes=("bool",),
    discontinuous=True,
)
calls(
    "histc.default(self, bins, min, max)",
    "library",
    arithmetic=per_operand(2),
    shapes=None,
    dtypes=("self",),
    discontinuous=True,
    priced=False,
)
calls(
    "topk.default(self, k, dim, largest, sorted)",
    "library",
    arithmetic=per_operand(1),
    shapes=kept,
    dtypes=("self", "int64"),
    discontinuous=True,
)


# The loss that picks one element of each row, and its gradient.


TARGETS = of_argument("target")
calls(
    """
    nll_loss_forward.default(self, target, weight, reduction, ignore_index)
    nll_loss2d_forward.default(self, target, weight, reduction, ignore_index)
    """,
    "library",
    arithmetic=each(TARGETS, 1),
    shapes=lambda call: [call.tensor("target") if call.arguments.get("reduction") == 0 else (), ()],
    dtypes=("self", "self"),
    traffic=Traffic(gathered={"self": TARGETS}),
)
calls(
    """
    nll_loss_backward.default(grad_output, self, target, weight, reduction, ignore_index, total_weight)
    nll_loss2d_backward.default(grad_output, self, target, weight, reduction, ignore_index, total_weight)
    """,
    "library",
    arithmetic=each(TARGETS, 1),
    shapes=like("self"),
    dtypes=("self",),
    traffic=Traffic(unread=("self",)),
)


# Copies, memory without values, and one element read by the host.


OVERWRITTEN = Traffic(unread=("self",))
calls(
    "copy_.default(self, src, non_blocking)",
    "library",
    arithmetic=NOTHING,
    shapes=over_self,
    dtypes=("self",),
    traffic=OVERWRITTEN,
)
reserves = partial(
    calls, operator_class="library", arithmetic=NOTHING, traffic=Traffic(unread=("*",), reserves=True), priced=False
)
reserves(
    """
    empty.memory_format(size, ...)
    new_empty.default(self, size, ...)
    new_empty_strided.default(self, size, stride, ...)
    """,
    shapes=factory,
)
reserves("empty_like.default(self, ...)", shapes=same)
calls(
    "_local_scalar_dense.default(self)",
    "library",
    arithmetic=NOTHING,
    shapes=no_result,
    traffic=Traffic(gathered={"self": lambda _: 1}),
)
# A condition of the program (`assert (x > 0).all()`), which raises where it does not hold.
calls("_assert_async.msg(self, assert_msg)", "library", arithmetic=NOTHING, shapes=no_result, priced=False, pure=False)
