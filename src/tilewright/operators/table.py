"""The operator table: what tilewright knows of each operator of ATen and of its own, one row each.

A row is found by the operator's full name (`aten.gelu.default`). An operator without a row runs
as PyTorch runs it and its cost is unknown.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from pkgutil import iter_modules

from tilewright import operators
from tilewright.operators.row import ROWS, Row

for _module in iter_modules(operators.__path__):
    # Each declares its rows as it is imported.
    import_module(f"{operators.__name__}.{_module.name}")
GETITEM = Row("getitem", "layout", lambda call, values, index: values[index], promotion="none", shapes=None)


def rows() -> Mapping[str, Row]:
    """All rows by name."""
    return ROWS


@cache
def row_of(target: object) -> Row | None:
    """The row of a node's target, or None: an overload, `getitem`, or a function that stands for an operator."""
    if target is operator.getitem:
        return GETITEM
    return ROWS.get(str(target)) or ROWS.get(getattr(target, "__name__", ""))
