"""The gradient of a table whose rows were taken by index, and other reductions of rows by sorted index."""

from __future__ import annotations

from functools import partial

from tilewright.operators.arithmetic import NOTHING, CallSizes, Count, Formula, each, elements, of_argument
from tilewright.operators.row import Traffic, own
from tilewright.operators.scatters import table_gradient
from tilewright.operators.shapes import CallAxes, Result, like


def _taken(table: str) -> Formula:
    """Elements of the rows of `table` that the argument `order` takes."""

    def count(sizes: CallSizes) -> Count:
        shape = sizes.shape(table)
        return elements(sizes.shape("order")) * shape[-1] if shape else 0

    return count


def _bounds(call: CallAxes) -> Result:
    found = call.shape[0] if call.known is not None else call.arguments["entries"] + 1
    return call.names.unknown_shape([found])


GRADIENT = partial(table_gradient, "entries", "dout")
own(
    "sorted_bounds(Tensor keys, SymInt entries) -> Tensor",
    "library",
    arithmetic=NOTHING,
    shapes=_bounds,
    dtypes=("int64",),
)
own(
    "embedding_sums(Tensor dout, Tensor keys, Tensor order, Tensor bounds, SymInt entries, SymInt padding) -> Tensor",
    "library",
    arithmetic=each(_taken("dout"), 1),
    traffic=Traffic(gathered={"dout": _taken("dout")}),
    shapes=GRADIENT,
    dtypes=("dout",),
)
own(
    "row_extremes(Tensor rows, Tensor keys, Tensor order, Tensor bounds, SymInt entries, bool largest, float start,"
    " bool include) -> Tensor",
    "library",
    arithmetic=each(_taken("rows"), 1),
    traffic=Traffic(gathered={"rows": _taken("rows")}),
    shapes=partial(table_gradient, "entries", "rows"),
    dtypes=("rows",),
    discontinuous=True,
)
own(
    "matching_sums(Tensor other, Tensor own, Tensor? rows, Tensor keys, Tensor order, Tensor bounds) -> Tensor",
    "library",
    arithmetic=each(_taken("other"), 2),
    traffic=Traffic(gathered={"other": _taken("other"), "rows": _taken("rows")}),
    shapes=like("own"),
    dtypes=("own",),
    discontinuous=True,
)
# It reads and writes the rows of the table that the keys name; the result is empty.
own(
    "add_embedding_sums_(Tensor(a!) table, Tensor dout, Tensor keys, Tensor order, Tensor bounds, SymInt padding)"
    " -> Tensor",
    "library",
    arithmetic=each(of_argument("dout"), 1),
    traffic=Traffic(gathered={"table": of_argument("dout")}, written=of_argument("dout")),
    shapes=lambda call: call.names.unknown_shape((0,)),
    dtypes=("dout",),
    priced=False,
)
