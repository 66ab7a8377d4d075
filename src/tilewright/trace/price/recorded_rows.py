"""Finds the row of the operator table for a recorded call, and presents the call as the row's rules need it.

A trace has an operator's name without its overload, and operands without names: the overload is the one that
takes as many, and the names are the row's. It has operands but not results, so the results follow from the row's
rule; where they do not, the call has no price.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import prod

from tilewright.operators.arithmetic import Count, Shape
from tilewright.operators.row import Row
from tilewright.operators.shapes import Axes, CallAxes, NumberAxes, UnknownShape
from tilewright.operators.table import rows
from tilewright.trace.price.recorded_call import ITEMSIZE, PositionalCall, Tensor

_SIZE_OF = {dtype: itemsize for itemsize, dtype in ITEMSIZE.values()}
_MOST_RESULTS = 100_000


def rows_of(name: str) -> list[Row]:
    """The rows of all overloads of a recorded name: `add`, `tilewright::softmax`."""
    return _rows(len(rows())).get(name, [])


@cache
def _rows(_: int) -> Mapping[str, list[Row]]:
    """Rows by recorded name; made anew when a row has been declared."""
    found: dict[str, list[Row]] = {}
    for row in rows().values():
        namespace, name = [*row.name.split("."), ""][:2]
        found.setdefault(name if namespace == "aten" else f"{namespace}::{name}", []).append(row)
    return found


def is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


def row_for(call: PositionalCall) -> Row | None:
    """The row of the called overload; for `add_` that of `add`."""
    rows = rows_of(call.name) or (rows_of(call.name.removesuffix("_")) if is_in_place(call.name) else [])
    given = len(call.operands)
    kinds = ["Tensor" if isinstance(operand, Tensor) else "Scalar" for operand in call.operands[:2]]
    scalar = kinds[1:] == ["Scalar"]

    def distance(row: Row) -> tuple[bool, int, bool, bool]:
        # Operands after the arguments are `out=`.
        takes, overload = len(row.arguments), row.name.split(".")[-1]
        return takes > given, abs(given - takes), overload != "_".join(kinds), overload.endswith("Scalar") != scalar

    return min(rows, key=distance, default=None)


@dataclass(frozen=True)
class RecordedCall:
    """A recorded call with its operands by name."""

    call: PositionalCall
    row: Row

    @cached_property
    def named(self) -> dict[str, Tensor | tuple[Tensor, ...] | str]:
        return dict(zip(self.row.arguments, self.call.operands, strict=False))

    @property
    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor operand with the name of its argument."""
        for name, operand in self.named.items():
            for tensor in operand if isinstance(operand, tuple) else (operand,):
                if isinstance(tensor, Tensor):
                    yield name, tensor

    @cached_property
    def results(self) -> list[Tensor]:
        """The results; raises UnknownShape if they do not follow from the operands."""
        if self.row.shapes is None:
            raise UnknownShape(self.row.name)
        axes = self.row.shapes(self._axes())
        several = axes if isinstance(axes, list) else [axes]
        if len(several) > _MOST_RESULTS:
            raise UnknownShape("more results than an operator has")
        dtypes = self.row.dtypes
        # A rule may give more results than the row has: RMS norm, which has no mean, uses LayerNorm's rule.
        every = zip(several, dtypes * len(several) if len(dtypes) == 1 else dtypes, strict=False)
        return [self._tensor(one, dtype) for one, dtype in every if one is not None]

    def _axes(self) -> CallAxes:
        values = [self.call.value(place) for place in range(len(self.call.operands))]
        arguments = {
            name: operand if isinstance(operand, Tensor | tuple) else value
            for (name, operand), value in zip(self.named.items(), values, strict=False)
        }
        count = len(self.row.dtypes)
        return CallAxes(
            NumberAxes(),
            {**dict.fromkeys(self.row.arguments), **arguments},
            _axes_of,
            [_axes_of(tensor) or () for _, tensor in self.tensors],
            count if count > 1 else None,
            None,
            self._dtype,
        )

    def _dtype(self, name: str) -> str:
        operand = self.named.get(name)
        if not isinstance(operand, Tensor):
            raise UnknownShape(f"no {name}")
        return operand.dtype

    def _tensor(self, axes: Axes, says: str) -> Tensor:
        shape = tuple(map(NumberAxes().size_of, axes))
        dtype = self._result_dtype(says)
        return Tensor(shape, prod(shape), _SIZE_OF[dtype], dtype)

    def _result_dtype(self, says: str) -> str:
        if says in _SIZE_OF:
            return says
        if says == "statistic":
            return "float64" if any(tensor.dtype == "float64" for _, tensor in self.tensors) else "float32"
        return self._dtype(says) if says else _common_dtype([tensor for _, tensor in self.tensors])

    # As formulas expect them.

    def argument(self, name: str) -> object:
        return self.call.value(self.row.arguments.index(name)) if name in self.named else None

    def shape(self, name: str) -> Shape | None:
        operand = self.named.get(name)
        if isinstance(operand, tuple):
            return (sum(tensor.elements for tensor in operand),)
        return operand.shape if isinstance(operand, Tensor) else None

    def operand(self, index: int = 0) -> Shape:
        return [tensor for _, tensor in self.tensors][index].shape

    def result(self, index: int = 0) -> Shape:
        return self.results[index].shape

    def number(self, count: Count) -> int:
        return int(count)

    def only_number(self, count: Count) -> int:
        return int(count)


def _axes_of(operand: object) -> Axes | None:
    return NumberAxes().unknown_shape(operand.shape) if isinstance(operand, Tensor) else None


def _common_dtype(tensors: Sequence[Tensor]) -> str:
    """The dtype that PyTorch promotes to: tensors without axes do not widen the others, and masks never do."""
    if not tensors:
        raise UnknownShape("no operands")
    values = [tensor for tensor in tensors if tensor.dtype != "bool"] or list(tensors)
    deciding = [tensor for tensor in values if tensor.shape] or values
    return max(deciding, key=lambda tensor: ("float" in tensor.dtype, tensor.itemsize)).dtype
