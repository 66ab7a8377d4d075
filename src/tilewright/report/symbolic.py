"""Sums of cost formulas in a case's named dimensions."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sympy import Expr

_BINARY: dict[type[ast.operator], Callable[[Expr, Expr], Expr]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_FUNCTIONS = ("Max", "Min", "floor", "ceiling")
_LARGEST_POWER = 16
_MOST_TERMS = 1_000


def add(formulas: Iterable[str | None]) -> str | None:
    """The sum of `formulas`, simplified; None if one of them is missing or no formula.

    >>> add(["M*N", "M*N + N", "N"])
    '2*M*N + 2*N'
    """
    from sympy import Add

    terms: list[Expr] = []
    for formula in formulas:
        term = parse(formula) if formula is not None else None
        if term is None:
            return None
        terms.append(term)
    return str(Add(*terms).expand())


def parse(formula: str) -> Expr | None:
    """`formula` as sympy sees it, every name a positive integer; None if it is no formula.

    A formula may come from somebody's run, and sympy's own parser evaluates Python; it would also
    take the dimensions `N`, `S`, `E` and `I` for functions and constants of its own.
    """
    try:
        tree = ast.parse(formula.strip(), mode="eval").body
        return _expression(tree) if _terms(tree) <= _MOST_TERMS else None
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None


def _expression(node: ast.expr) -> Expr:
    import sympy

    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return sympy.Integer(number)
        case ast.Name(id=name):
            return sympy.Symbol(name, integer=True, positive=True)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_expression(operand)
        case ast.BinOp(left=base, op=ast.Pow(), right=ast.Constant(value=int() as power)):
            powers = any(isinstance(inner, ast.Pow) for inner in ast.walk(base))
            if 0 <= power <= _LARGEST_POWER and not powers:
                return _expression(base) ** power
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _BINARY[type(op)](_expression(left), _expression(right))
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=[]) if name in _FUNCTIONS:
            function: Callable[..., Expr] = getattr(sympy, name)
            return function(*map(_expression, arguments))
    raise ValueError(f"not a formula: {ast.unparse(node)}")


def _terms(node: ast.expr) -> int:
    """How many terms the formula may have once its products are multiplied out."""
    match node:
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub(), right=right):
            return _terms(left) + _terms(right)
        case ast.BinOp(left=base, op=ast.Pow(), right=ast.Constant(value=int() as power)):
            return int(_terms(base) ** min(max(power, 0), _LARGEST_POWER))
        case ast.BinOp(left=left, right=right):
            return _terms(left) * _terms(right)
    return 1
