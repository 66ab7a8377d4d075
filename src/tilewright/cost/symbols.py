"""Counts as formulas: reading them back, adding them up, printing them in the case's own names."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Sequence
from functools import cache

import sympy

from tilewright.records.program import Cost

SUPERSCRIPTS = str.maketrans("0123456789/", "⁰¹²³⁴⁵⁶⁷⁸⁹ᐟ")
OPERATIONS: dict[type[ast.operator], Callable[[sympy.Expr, sympy.Expr], sympy.Expr]] = {
    ast.Add: lambda x, y: x + y,
    ast.Sub: lambda x, y: x - y,
    ast.Mult: lambda x, y: x * y,
    ast.Div: lambda x, y: x / y,
}
LARGEST_POWER = 16
MOST_TERMS = 1_000


@cache
def parse(text: str) -> sympy.Expr:
    """A stored formula as a sympy expression in positive integer symbols, multiplied out.

    Not `sympy.sympify`, which evaluates what it is given and takes `N`, `S`, `E`, `I`, `O`, `Q` for its
    own objects. Raises `ValueError` for anything but sums, products and small powers of names and
    integers: a formula may come from an untrusted file.

    >>> parse("5*N*M + 2*N") == parse("N*(2 + 5*M)")
    True
    """
    try:
        tree = ast.parse(text.strip(), mode="eval").body
        value = sympy.expand(_expression(tree)) if _terms(tree) <= MOST_TERMS else sympy.nan
        if value.has(sympy.nan, sympy.zoo):
            raise ValueError("it is too long, or divides by zero")
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ValueError(f"{text[:80]!r} is no formula of named dimensions: {error}") from error
    return value


def _expression(node: ast.expr) -> sympy.Expr:
    match node:
        case ast.Name(name):
            return sympy.Symbol(name, positive=True, integer=True)
        case ast.Constant(int(value)) if not isinstance(value, bool):
            return sympy.Integer(value)
        case ast.UnaryOp(ast.USub(), operand):
            return -_expression(operand)
        case ast.BinOp(base, ast.Pow(), exponent) if not any(isinstance(n, ast.Pow) for n in ast.walk(base)):
            power = _expression(exponent)
            if power.is_Rational and abs(power) <= LARGEST_POWER:
                return _expression(base) ** power
        case ast.BinOp(left, operation, right) if type(operation) in OPERATIONS:
            return OPERATIONS[type(operation)](_expression(left), _expression(right))
    raise ValueError(type(node).__name__)


def _terms(node: ast.expr) -> int:
    """How many terms the formula may have once its products are multiplied out."""
    match node:
        case ast.BinOp(left, ast.Add() | ast.Sub(), right):
            return _terms(left) + _terms(right)
        case ast.BinOp(base, ast.Pow(), ast.Constant(int(power))):
            return int(_terms(base) ** min(power, LARGEST_POWER))
        case ast.BinOp(left, _, right):
            return _terms(left) * _terms(right)
    return 1


def pretty(formula: str | sympy.Expr, names: Sequence[str] = ()) -> str:
    """The formula as people write it, highest degree first, each term's symbols in the order of `names`.

    >>> pretty("2*N + 5*M*N", ["N", "M"]), pretty("4*B*d*N**2", ["B", "N"]), pretty("2 - N")
    ('5·N·M + 2·N', '4·B·N²·d', '−N + 2')
    """
    expression = sympy.expand(parse(formula) if isinstance(formula, str) else formula)
    rest = sorted({str(symbol) for symbol in expression.free_symbols} - set(names))
    place = {name: i for i, name in enumerate([*names, *rest])}

    def order(term: sympy.Expr) -> tuple[sympy.Expr, list[tuple[int, sympy.Expr]]]:
        powers = {place[str(b)]: e for b, e in term.as_coeff_Mul()[1].as_powers_dict().items() if b.is_Symbol}
        return -sum(powers.values()), [(i, -powers[i]) for i in sorted(powers)]

    text = ""
    for term in sorted(sympy.Add.make_args(expression), key=order):
        sign = "−" if term.could_extract_minus_sign() else "+"
        text += f" {sign} {_term(abs(term), place)}"
    return text.removeprefix(" + ").replace(" − ", "−", text.startswith(" − "))


def _term(term: sympy.Expr, place: dict[str, int]) -> str:
    coefficient, symbols = term.as_coeff_Mul()
    powers = [(base, power) for base, power in symbols.as_powers_dict().items() if base != 1]
    powers.sort(key=lambda factor: place.get(str(factor[0]), len(place)))
    above = [_power(base, power) for base, power in powers if power > 0]
    below = [_power(base, -power) for base, power in powers if power < 0]
    numerator = "·".join(([str(coefficient.p)] if coefficient.p != 1 or not above else []) + above)
    below = ([str(coefficient.q)] if coefficient.q != 1 else []) + below
    if not below:
        return numerator
    return f"{numerator}/{below[0]}" if len(below) == 1 else f"{numerator}/({'·'.join(below)})"


def _power(base: sympy.Expr, exponent: sympy.Expr) -> str:
    name = str(base) if base.is_Symbol else f"({base})"
    return name if exponent == 1 else name + str(exponent).translate(SUPERSCRIPTS)


def total(costs: Iterable[Cost]) -> Cost:
    """The sum of several kernels' costs.

    A formula that one part lacks counts with its number, so that the sum still gives the numeric total.
    Provenance is "unknown" as soon as one part's is: the sum is then a lower bound.
    """
    parts = list(costs)
    known = [cost for cost in parts if cost.provenance == "formula"]

    def formula(numbers: Iterable[int], texts: Iterable[str | None]) -> str | None:
        pairs = list(zip(numbers, texts, strict=True))
        if pairs and all(text is None for _, text in pairs):
            return None
        return str(sympy.Add(*(sympy.Integer(n) if text is None else parse(text) for n, text in pairs)))

    return Cost(
        reads=sum(cost.reads for cost in parts),
        writes=sum(cost.writes for cost in parts),
        unused=sum(cost.unused for cost in parts),
        bytes_read=sum(cost.bytes_read for cost in parts),
        bytes_written=sum(cost.bytes_written for cost in parts),
        flops=sum(cost.flops for cost in parts),
        transcendentals=sum(cost.transcendentals for cost in parts),
        reads_symbolic=formula((c.reads for c in known), (c.reads_symbolic for c in known)),
        writes_symbolic=formula((c.writes for c in known), (c.writes_symbolic for c in known)),
        unused_symbolic=formula((c.unused for c in known), (c.unused_symbolic for c in known)),
        flops_symbolic=formula((c.flops for c in known), (c.flops_symbolic for c in known)),
        provenance="formula" if len(known) == len(parts) else "unknown",
    )


def shown(number: int, formula: str | None, cost: Cost, names: Sequence[str] = ()) -> str:
    """One count of `cost` for a reader: its formula where there is one, else its number.

    `≥` before it where operators of unknown cost are part of it; "unknown" where nothing else is.
    """
    text = pretty(formula, names) if formula is not None else f"{number:,}"
    if cost.provenance == "formula":
        return text
    return f"≥ {text}" if cost.bytes or cost.flops else "unknown"
