"""What a row of the operator table says, and how the files of this room declare theirs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from tilewright.operators.language import Trace
from tilewright.records.program import OperatorClass

Promotion = Literal["result", "common", "none"]


@dataclass(frozen=True)
class Call:
    """What a body may ask about the operator call it stands for."""

    trace: Trace
    dtype: str
    """Storage dtype of the (first) result."""
    shape: tuple[int, ...]
    """Shape of the (first) result."""
    common: str
    """The dtype PyTorch promotes the operands to."""


Body = Callable[..., Any]
"""`body(call, *args, **kwargs)` with each tensor argument as a `Value`; gives a `Value` or a tuple of them."""


@dataclass(frozen=True)
class Row:
    """One operator. `body` is None for what stays a call: of a library, or of a hand-written kernel."""

    name: str
    operator_class: OperatorClass
    body: Body | None = None
    promotion: Promotion = "result"
    """What operands are converted to first: the result's dtype, their common dtype, or nothing."""
    discontinuous: bool = False
    """Small differences of the operands can change the result by a lot; they must be eager's own."""
    pure: bool = True
    """False for an operator that draws random numbers or writes an operand."""


ROWS: dict[str, Row] = {}


def declare(*rows: Row) -> None:
    for row in rows:
        assert row.name not in ROWS, f"{row.name} has two rows"
        ROWS[row.name] = row


def body(
    *names: str,
    operator_class: OperatorClass = "pointwise",
    promotion: Promotion = "result",
    discontinuous: bool = False,
) -> Callable[[Body], Body]:
    """Declare rows `aten.<name>` that share the decorated body."""

    def register(function: Body) -> Body:
        declare(*(Row(f"aten.{name}", operator_class, function, promotion, discontinuous) for name in names))
        return function

    return register
