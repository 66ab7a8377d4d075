"""Dead-code and common-subexpression elimination on recorded operations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from tilewright.operators.axes import leaves, strides_of
from tilewright.operators.language import Op


def eliminate_redundant(ops: list[Op], wanted: list[int]) -> tuple[list[Op], dict[int, int]]:
    """The ops that `wanted` needs, with equal ones merged; and the new position of each old op."""
    live = set(wanted)
    for position in reversed(range(len(ops))):
        if position in live:
            live.update(ops[position].args)
    kept: list[Op] = []
    where: dict[int, int] = {}
    known: dict[Any, int] = {}
    for position, op in enumerate(ops):
        if position not in live:
            continue
        args = tuple(where[a] for a in op.args)
        op = op if args == op.args else replace(op, args=args)
        key = (op.name, op.args, op.dtype, _identity(op))
        if key not in known:
            known[key] = len(kept)
            kept.append(op)
        where[position] = known[key]
        first = kept[known[key]]
        approximate, exact = first.approximate and op.approximate, first.exact or op.exact
        if (approximate, exact) != (first.approximate, first.exact):
            kept[known[key]] = replace(first, approximate=approximate, exact=exact)
    return kept, where


def _identity(op: Op) -> Any:
    if op.name == "load":
        strides = frozenset(strides_of(op.detail.dims, op.detail.strides).items())
        return op.detail.key, strides, op.detail.offset, op.detail.by
    if op.name == "reduce":
        return op.detail[0], frozenset(leaves(op.detail[1]))
    if op.name == "scan":
        return op.detail[0], tuple(leaves(op.detail[1]))
    if op.name == "index":
        return frozenset(strides_of([op.detail], [1]).items())
    if op.name == "draw":
        places = frozenset(strides_of([op.detail.axes], [1]).items())
        return op.detail.key, places, op.detail.below, op.detail.philox, op.detail.skip
    if op.name == "const":
        # repr distinguishes 1, 1.0 and True, and 0.0 and -0.0; NaN's equals itself.
        return repr(op.detail)
    return op.detail
