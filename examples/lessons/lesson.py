"""A lesson: questions with their truths, and the operator that a student may write."""

from __future__ import annotations

import ast
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from tilewright.records.errors import UsageError

_OPERATIONS: Mapping[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}


@dataclass(frozen=True)
class Question:
    """One prediction: a number or a formula in the lesson's sizes, or one of `choices`."""

    name: str
    truth: Callable[[], float | Sequence[str]]
    """Counted or measured when it is asked for; of `choices` each that is right: what was measured may be a tie."""
    factor: float = 1.0
    """How far off a right answer may be: 1 for what is counted, more for what is measured."""
    choices: Sequence[str] = ()


@dataclass(frozen=True)
class Lesson:
    """What `tilewright check NAME FILE` grades."""

    questions: Sequence[Question]
    sizes: Mapping[str, int] = field(default_factory=dict)
    operator: str = ""
    """The operator of `operators.py` that a student may write; empty: there is none."""


@dataclass(frozen=True)
class Words:
    """What is said of an answer: why the right one is right, and what some wrong ones overlook."""

    why: str
    mistakes: Mapping[str, str] = field(default_factory=dict)


def value(formula: str, sizes: Mapping[str, int]) -> float:
    """The number that a formula such as `5*N*M + 2*N` gives. Raises UsageError; nothing else is evaluated.

    >>> value("5·N·M + 2N", {"N": 10, "M": 3}), value("5NM + 2e1", {"N": 10, "M": 3}), value("2 N²M³", {"N": 2, "M": 3})
    (170.0, 170.0, 216.0)
    """
    text = formula.strip()
    for sign, operation in {"·": "*", "×": "*", "^": "**", "²": "**2", "³": "**3"}.items():
        text = text.replace(sign, operation)
    # A factor needs no sign before a name, as in 5NM or 5 N M; 2e7 is a number.
    text = re.sub(r"(?<=[\w)]) +(?=[\w(])", "*", text)
    text = re.sub(r"(?<=\d)(?=[A-Za-z(])(?![eE][+-]?\d)", "*", text)
    text = re.sub(
        r"(?<![\w.])[A-Za-z]{2,}", lambda word: "*".join(word[0]) if {*word[0]} <= {*sizes} else word[0], text
    )
    try:
        return _number(ast.parse(text.replace(",", ""), mode="eval").body, sizes)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError) as error:
        known = ", ".join(sizes) or "no names"
        raise UsageError(f"cannot read {formula!r}: write a number or a formula with + - * / ** and {known}") from error


def _number(node: ast.AST, sizes: Mapping[str, int]) -> float:
    match node:
        case ast.Constant(value=int() | float() as number):
            return float(number)
        case ast.Name(id=name) if name in sizes:
            return float(sizes[name])
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_number(operand, sizes)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATIONS:
            return float(_OPERATIONS[type(op)](_number(left, sizes), _number(right, sizes)))
    raise ValueError(f"unexpected {type(node).__name__}")
