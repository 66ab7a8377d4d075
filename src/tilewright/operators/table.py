"""The operator table: what tilewright knows of each operator of ATen and of its own, one row each.

A row is found by the operator's full name (`aten.gelu.default`). An operator without a row runs
as PyTorch runs it and its cost is unknown.
"""

from __future__ import annotations

import operator
from functools import cache

from tilewright.operators import (
    activations,
    layout,
    library,
    losses,
    normalization,
    own,
    pointwise,
    random,
    reduction,
)
from tilewright.operators.row import ROWS, Row

# Each declares its rows as it is imported.
assert activations and layout and library and losses and normalization and own and pointwise and random and reduction

GETITEM = Row("getitem", "layout", lambda call, values, index: values[index], promotion="none")


@cache
def row_of(target: object) -> Row | None:
    """The row of a node's target (an ATen overload, or `operator.getitem`), or None."""
    return GETITEM if target is operator.getitem else ROWS.get(str(target))
