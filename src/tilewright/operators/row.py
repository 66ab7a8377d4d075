"""The fields of a row of the operator table, and the functions that declare rows.

A row is written `name(argument, …)`, with the names of PyTorch's schema, so that a trace, which has values without
names, can be read where PyTorch is not installed:

    @body("leaky_relu.default(self, negative_slope)")
    def leaky_relu(c, x, slope=0.01):
        return where(x > 0, x, x * slope)

That is all there is to say of a pointwise operator: its FLOPs are those of the body, its axes and its dtype follow
from its operands. Any other says what is not so. Bodies of one expression stand in tables (`formulas`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from ctypes import c_float
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import copysign, inf
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from tilewright.operators.arithmetic import Arithmetic, CallSizes, Count, Formula
from tilewright.operators.language import FLOATS, Scalar, Trace, Value
from tilewright.operators.shapes import Rule, pointwise
from tilewright.records.program import OperatorClass

Promotion = Literal["result", "common", "none"]
ALL = "*"


@dataclass(frozen=True)
class Call:
    """The operator call whose body is traced, as the body sees it."""

    trace: Trace
    dtype: str
    """Storage dtype of the (first) result."""
    shape: tuple[int, ...]
    """Shape of the (first) result."""
    common: str
    """The dtype PyTorch promotes the operands to."""
    in_cpp: bool = False
    """Whether the kernel will be one in C++."""
    exact: bool = False
    """Whether something discontinuous depends on the result, which then has eager's bits."""
    apart: bool = False
    """Whether each reduction is a call by itself, and not part of one kernel."""

    def quotient(self, x: Value, y: Value | Scalar) -> Value:
        """x / y; PyTorch's kernels for GPUs multiply by the reciprocal of a number, rounded to the dtype, instead.

        A mean that is written out is a quotient all the same: that of equal values is that value. A number that is not
        known, as in a trace, is divided by.
        """
        op = self.trace.ops[x.id]
        is_mean = op.name == "reduce" and op.detail[0] == "sum"
        if self.in_cpp or not isinstance(y, int | float) or x.dtype not in FLOATS or is_mean:
            return x / y
        number = y if x.dtype == "float64" else c_float(y).value
        inverse = 1 / number if number else copysign(inf, number)
        return x * (inverse if x.dtype == "float64" else c_float(inverse).value)


Body = Callable[..., Any]
"""`body(call, *args, **kwargs)` with each tensor argument as a `Value`; gives a `Value` or a tuple of them."""


@dataclass(frozen=True)
class Traffic:
    """Where the kernel of an operator does not read all of its operands once and write all of its results once."""

    unread: tuple[str, ...] = ()
    """Tensor arguments whose elements are never read; `*` for all of them."""
    gathered: Mapping[str, Formula] = field(default_factory=dict)
    """Arguments read at given places only, and how many elements those are.

    Places that repeat are read from the cache or again; which do is not known before the program runs, so each
    counts, up to the whole tensor.
    """
    writes: tuple[str, ...] = ()
    """Arguments that are written to, where the schema is not at hand to say so."""
    written: Formula | None = None
    """Elements of an operand that are written to, where those are not all."""
    reserves: bool = False
    """The results are memory without values."""
    between: tuple[Formula, Formula] | None = None
    """Elements that the several kernels of an operator read and write between the first and the last of them.

    Those of the dtype of its first operand. Where a kernel runs once for each chunk of the tokens, it counts as one.
    """
    scratch: Callable[[CallSizes, int], Count] | None = None
    """Bytes that it works in beside its results, of a call and the bytes of an element of its first operand."""


@dataclass(frozen=True)
class Row:
    """One operator. `body` is None for what stays a call: of a library, or of a hand-written kernel."""

    text: str
    """`aten.gelu.default(self, approximate)`; of tilewright's own the whole schema."""
    operator_class: OperatorClass
    body: Body | None = None
    promotion: Promotion = "result"
    """The dtype to which operands are converted first: the result's, their common one, or none."""
    is_relabelled: bool = False
    """A view of all elements of its operand, which begins where that begins: never a copy."""
    is_cheap_again: bool = False
    """A reduction whose first result backward may compute again, in one pass over rows that fit on chip."""
    discontinuous: bool | Callable[[Mapping[str, Any]], bool] = False
    """Small differences of the operands can change the result by a lot; they must be eager's own. Of some calls only:
    a function of their arguments."""
    cancels: bool = False
    """It subtracts nearly equal numbers: operands are rounded as in eager, but need not be bitwise forward's."""
    pure: bool = True
    """False for an operator that draws random numbers or writes an operand; it has no body, which kernels repeat."""
    arithmetic: Arithmetic | None = None
    """FLOPs and transcendentals; None: those of the body of a pointwise operator, else unknown."""
    counts_complex: bool = False
    """Its arithmetic is that of complex tensors, too; what computes nothing needs no word."""
    traffic: Traffic = Traffic()
    shapes: Rule | None = pointwise
    """How the axes of the results follow from those of the operands; None: unknown."""
    dtypes: tuple[str, ...] = ("",)
    """One for each result: a dtype, the name of the argument that has it, or "" for the operands' common dtype."""
    rate: str = ""
    """The dtype at whose rate of products it computes, if not that of its result."""
    priced: bool = True
    """Whether a recorded call has a price: not if the operators that it calls are recorded in its place, or if what
    it moves depends on values."""
    role: str | Callable[[Mapping[str, Any]], str] = ""
    """Its label in a drawing of a model, by its arguments; empty: its name."""
    part: Literal["", "activation", "copy", "sum"] = ""
    """Its part in a drawing of a model, where the class is too coarse."""
    integral: bool = False
    """Of the bits of integers and booleans: PyTorch's kernels refuse floats, its fake tensors accept them."""
    own: bool = False
    """One of tilewright's operators: a hand-written kernel, or with a body a generated one."""

    @cached_property
    def name(self) -> str:
        """`aten.gelu.default`, as `str` writes an overload."""
        return self.text.partition("(")[0]

    @cached_property
    def arguments(self) -> tuple[str, ...]:
        """The names of the arguments, in the order of PyTorch's schema.

        The list may end with `...`, where nobody asks for the others.

        >>> Row("tilewright.f.default(Tensor x, str way='auto') -> Tensor", "library").arguments
        ('x', 'way')
        """
        inside = self.text.partition("(")[2].partition(") ->")[0].removesuffix(")")
        declared = [one.strip() for one in inside.split(",")]
        return tuple(one.split()[-1].partition("=")[0] for one in declared if one not in ("", "*", "..."))

    @cached_property
    def schema(self) -> str:
        """The schema that defines one of tilewright's own operators in `torch.library`."""
        namespace, name, rest = self.text.split(".", 2)
        assert namespace == "tilewright"
        return name + rest[rest.index("(") :]


ROWS: dict[str, Row] = {}


def declare(*rows: Row) -> None:
    for row in rows:
        assert row.name not in ROWS, f"{row.name} has two rows"
        assert row.pure or row.body is None, f"{row.name} has a body, which kernels may repeat, but is not pure"
        ROWS[row.name] = row


F = TypeVar("F", bound=Body)


class RowFields(TypedDict, total=False):
    """Optional fields of `Row`, beside its name and body."""

    promotion: Promotion
    is_relabelled: bool
    is_cheap_again: bool
    discontinuous: bool | Callable[[Mapping[str, Any]], bool]
    cancels: bool
    pure: bool
    arithmetic: Arithmetic | None
    counts_complex: bool
    traffic: Traffic
    shapes: Rule | None
    dtypes: tuple[str, ...]
    rate: str
    priced: bool
    role: str | Callable[[Mapping[str, Any]], str]
    part: Literal["", "activation", "copy", "sum"]
    integral: bool


def body(*texts: str, operator_class: OperatorClass = "pointwise", **says: Unpack[RowFields]) -> Callable[[F], F]:
    """Declare rows `aten.<text>` that share the decorated body; `says` is what else they say."""

    def register(function: F) -> F:
        declare(*(_row(f"aten.{text}", operator_class, function, says) for text in texts))
        return function

    return register


def formulas(table: Mapping[str, Body], **says: Unpack[RowFields]) -> None:
    """Declare pointwise rows `aten.<text>` by the formula of each; operators of one text share it."""
    for texts, formula in table.items():
        body(*_operators(texts), **says)(formula)


def calls(texts: str, operator_class: OperatorClass, **says: Unpack[RowFields]) -> None:
    """Declare rows `aten.<text>`, one after the other, of operators that stay calls of a library."""
    declare(*(_row(f"aten.{text}", operator_class, None, says) for text in _operators(texts)))


def _operators(texts: str) -> list[str]:
    return [" ".join(text.split()) for text in re.findall(r"[^()]+\([^()]*\)", texts)]


def own(schema: str, operator_class: OperatorClass, body: Body | None = None, **says: Unpack[RowFields]) -> None:
    """Declare the row of one of tilewright's own operators by its schema: `softmax(Tensor x, bool log) -> Tensor`.

    With a `body` its kernels are generated: as ATen's in a compiled graph, and for eager calls by themselves.
    """
    name, parenthesis, rest = schema.partition("(")
    declare(replace(_row(f"tilewright.{name}.default{parenthesis}{rest}", operator_class, body, says), own=True))


def _row(text: str, operator_class: OperatorClass, function: Body | None, says: RowFields) -> Row:
    """A row; by PyTorch's convention an operator whose name ends in an underscore writes to an operand."""
    said: RowFields = {"pure": not text.split(".")[1].endswith("_"), **says}
    return Row(text, operator_class, function, **said)
