"""The gradient of a table whose rows were taken by index."""

from __future__ import annotations

from functools import partial

from tilewright.operators.arithmetic import each, of_argument
from tilewright.operators.row import Traffic, own
from tilewright.operators.scatters import table_gradient

GRADIENT = partial(table_gradient, "entries", "dout")
own(
    "embedding_sums(Tensor dout, Tensor keys, Tensor order, SymInt entries, SymInt padding) -> Tensor",
    "library",
    arithmetic=each(of_argument("dout"), 1),
    shapes=GRADIENT,
    dtypes=("dout",),
)
# It reads and writes the rows of the table that the keys name; the result is empty.
own(
    "add_embedding_sums_(Tensor(a!) table, Tensor dout, Tensor keys, Tensor order, SymInt padding) -> Tensor",
    "library",
    arithmetic=each(of_argument("dout"), 1),
    traffic=Traffic(gathered={"table": of_argument("dout")}, written=of_argument("dout")),
    shapes=lambda call: call.names.unknown_shape((0,)),
    dtypes=("dout",),
    priced=False,
)
