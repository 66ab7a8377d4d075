"""FLOPs and transcendentals of a call, as formulas of its shapes.

Counting: every addition, multiplication, division, negation, comparison, minimum and maximum is one
FLOP, a multiply-add is two; selections, logic, casts and copies are none. Exponentials, logarithms,
roots, error functions and trigonometry are *transcendentals*, counted apart. Values are counted as
the textbook formula has them, not as a library's polynomial computes them.

A pointwise row counts its own body; any other says what it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias

if TYPE_CHECKING:
    import sympy

Count: TypeAlias = "int | sympy.Expr"
"""A number, or a formula in the case's named dimensions: every rule gives either, from shapes of either."""
Shape: TypeAlias = tuple[Count, ...]


class UnknownCost(Exception):
    """The cost of this call is not known before it runs; the message says why."""


class NoFormula(Exception):
    """A count that is known as a number only."""


class CallSizes(Protocol):
    """One call seen through numbers or through symbols."""

    def argument(self, name: str) -> object:
        """The argument `name` of the operator's schema."""

    def shape(self, name: str) -> Shape | None:
        """The shape of tensor argument `name`, of a list of tensors [all their elements]; None where it is absent."""

    def operand(self, index: int = 0) -> Shape:
        """The shape of the `index`-th tensor operand."""

    def result(self, index: int = 0) -> Shape:
        """The shape of the `index`-th result."""

    def number(self, count: Count) -> int:
        """A count at the sizes of this call, to compare it with another."""

    def only_number(self, count: Count) -> int:
        """A count at the sizes of this call, to compute with; raises `NoFormula` where a formula is wanted."""


Formula = Callable[[CallSizes], Count]


@dataclass(frozen=True)
class Arithmetic:
    """The operations of one operator."""

    flops: Formula
    transcendentals: Formula


def elements(shape: Shape | None) -> Count:
    """The elements of a tensor; of an absent one none."""
    count: Count = 1 if shape is not None else 0
    for size in shape or ():
        count = count * size
    return count


def nothing(_: CallSizes) -> Count:
    return 0


def of_result(sizes: CallSizes) -> Count:
    return elements(sizes.result())


def of_operand(sizes: CallSizes) -> Count:
    return elements(sizes.operand())


def of_argument(*names: str) -> Formula:
    """The elements of these arguments together."""

    def count(sizes: CallSizes) -> Count:
        total: Count = 0
        for name in names:
            total = total + elements(sizes.shape(name))
        return total

    return count


def each(where: Formula, flops: int = 0, transcendentals: int = 0) -> Arithmetic:
    """`flops` and `transcendentals` for each element of `where`."""

    def times(cost: int) -> Formula:
        return (lambda sizes: cost * where(sizes)) if cost else nothing

    return Arithmetic(times(flops), times(transcendentals))


def per_result(flops: int = 0, transcendentals: int = 0) -> Arithmetic:
    return each(of_result, flops, transcendentals)


def per_operand(flops: int = 0, transcendentals: int = 0) -> Arithmetic:
    """`flops` and `transcendentals` for each element of the first operand."""
    return each(of_operand, flops, transcendentals)


NOTHING = Arithmetic(nothing, nothing)


def wanted(sizes: CallSizes, results: int) -> list[int]:
    """1 for each result that the argument `output_mask` asks for, 0 for the others."""
    mask = sizes.argument("output_mask")
    return [int(bool(asked)) for asked in mask] if isinstance(mask, Sequence) else [1] * results
