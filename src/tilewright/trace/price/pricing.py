"""The bytes and operations of one recorded operator call, from the profiler's shapes and dtypes.

The counting is that of `tilewright.cost`, by the same rows of the operator table: an element counts once, an expanded
operand its own elements only. An operator without a row has an unknown cost, never zero. The profiler does not write
text arguments: the activation is unknown, and the one with the fewest FLOPs is assumed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from tilewright.operators.arithmetic import NOTHING, Arithmetic, NoFormula, UnknownCost
from tilewright.operators.axes import Unfusable
from tilewright.operators.counting import arithmetic_of, count_element
from tilewright.operators.row import ALL, Row
from tilewright.operators.shapes import UnknownShape
from tilewright.records.program import Cost
from tilewright.trace.price.recorded_call import PositionalCall, Tensor
from tilewright.trace.price.recorded_rows import RecordedCall, is_in_place, row_for, rows_of

_FOREACH = "_foreach_"


@dataclass(frozen=True)
class Price:
    """A cost, the dtype of its arithmetic, and what sets its rate: matrix units (`compute`) or not."""

    cost: Cost
    dtype: str
    kind: str


def price(call: PositionalCall) -> Price | None:
    """The price of a call; None where no row knows it."""
    try:
        if call.name.startswith(_FOREACH) and not any(row.priced for row in rows_of(call.name)):
            return _price_each(call)
        row = row_for(call)
        arithmetic = None if row is None else arithmetic_of(row)
        if row is None or arithmetic is None or not row.priced or row.operator_class == "layout":
            return None
        return _price(RecordedCall(call, row), arithmetic)
    except (UnknownShape, UnknownCost, NoFormula, Unfusable):
        return None
    except (IndexError, KeyError, ValueError, TypeError, AttributeError, AssertionError, OverflowError):
        # A trace may hold shapes that the operator does not accept; these have no cost.
        return None


def _price(recorded: RecordedCall, arithmetic: Arithmetic) -> Price:
    reads, writes = list(_reads(recorded)), _writes(recorded)
    shown = next(iter([*writes, *reads]), None)
    cost = Cost(
        reads=sum(tensor.own for tensor in reads),
        writes=sum(tensor.own for tensor in writes),
        bytes_read=sum(tensor.nbytes for tensor in reads),
        bytes_written=sum(tensor.nbytes for tensor in writes),
        flops=int(arithmetic.flops(recorded)),
        transcendentals=int(arithmetic.transcendentals(recorded)),
    )
    kind = "compute" if recorded.row.operator_class == "compute" else "pointwise"
    return Price(cost, recorded.row.rate or (shown.dtype if shown else ""), kind)


def _reads(recorded: RecordedCall) -> Iterator[Tensor]:
    traffic = recorded.row.traffic
    for name, tensor in recorded.tensors:
        if name in traffic.unread or ALL in traffic.unread:
            continue
        places = traffic.gathered.get(name)
        yield replace(tensor, own=min(tensor.own, int(places(recorded)))) if places else tensor


def _writes(recorded: RecordedCall) -> list[Tensor]:
    written = recorded.row.traffic.writes
    if written:
        return [tensor for name, tensor in recorded.tensors if name in written]
    if is_in_place(recorded.call.name):
        return [tensor for _, tensor in recorded.tensors][:1]
    return recorded.results


def _price_each(call: PositionalCall) -> Price | None:
    """The price of an operator over lists of tensors: the sum of its prices for single tensors."""
    single = replace(call, name=call.name.removeprefix(_FOREACH))
    rows = rows_of(single.name) or rows_of(single.name.removesuffix("_"))
    lists, values = call.lists, [single.value(place) for place in range(len(call.operands))]
    given = [value if isinstance(operand, str) else ... for operand, value in zip(call.operands, values, strict=True)]
    found = next(((row, count) for row in rows if (count := _count(row, given)) is not None), None)
    if found is None:
        return None
    row, (flops, special) = found
    elements = sum(tensor.elements for tensor in lists[0])
    reads = list(_reads(RecordedCall(single, row)))
    cost = Cost(
        reads=sum(tensor.own for tensor in reads),
        writes=sum(tensor.own for tensor in lists[0]),
        bytes_read=sum(tensor.nbytes for tensor in reads),
        bytes_written=sum(tensor.nbytes for tensor in lists[0]),
        flops=flops * elements,
        transcendentals=special * elements,
    )
    return Price(cost, lists[0][0].dtype if lists[0] else "", "pointwise")


def _count(row: Row, given: list[object]) -> tuple[int, int] | None:
    """FLOPs and transcendentals for one element; None where the row is of another overload, or counts no elements."""
    if row.arithmetic is NOTHING:
        return 0, 0
    try:
        return count_element(row, given) if row.operator_class == "pointwise" and row.body else None
    except TypeError:
        return None


def price_generated(call: PositionalCall) -> Price | None:
    """A kernel that Inductor generated: each tensor argument moves once, which is the least it can do."""
    if not call.tensors:
        return None
    largest = max(call.tensors, key=lambda tensor: tensor.elements)
    reads, moved = (sum(getattr(tensor, count) for tensor in call.tensors) for count in ("own", "nbytes"))
    return Price(Cost(reads=reads, bytes_read=moved), largest.dtype, "pointwise")
