"""The solver of symbolic shapes: axes are products of named factors, unified by the operators that combine them.

An *axis* is a tuple of factors, major to minor; a size-1 axis without a name is `()`. A factor is
a sympy expression: a named dimension `D`, a part of one (`D/H`, `4*D`), or a placeholder (a sympy
`Dummy`) for a factor of known size whose name is not known yet. A placeholder gets its name when a
broadcast or a contraction unifies it with a named factor; if none does, it becomes a number. Equal
sizes alone do not identify two dimensions, except in `_guess`, under the conditions stated there.
"""

from __future__ import annotations

import keyword
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from math import prod

import sympy

Axis = tuple[sympy.Expr, ...]
Axes = tuple[Axis, ...]

SMALL_MULTIPLE = 8
"""A parameter axis may be read as k times its neighbour for k up to this (a feed-forward layer's 4·D)."""


class AxisNames:
    """The named dimensions of a case, and the names inferred so far for the other axes of a graph.

    `sizes`: every named dimension; `input_names`: those that name an axis of an input. The others
    name parts of axes (heads) and axes of parameters (hidden width).
    """

    def __init__(self, sizes: Mapping[str, int], input_names: Iterable[str]) -> None:
        # A stored formula can be parsed only if its names are identifiers.
        usable = {name for name in sizes if name.isidentifier() and not keyword.iskeyword(name)}
        self.named = {name: sympy.Symbol(name, positive=True, integer=True) for name in sizes if name in usable}
        inner = usable - set(input_names)
        self._inner = [self.named[name] for name in sizes if name in inner]
        self._sizes = {symbol: sympy.Integer(sizes[name]) for name, symbol in self.named.items()}
        self._bound: dict[sympy.Dummy, Axis] = {}
        self._neighbours: dict[sympy.Dummy, list[Axis]] = {}
        self._parameters: list[Axis] = []
        self._splits: list[tuple[sympy.Expr, sympy.Expr, sympy.Expr]] = []

    # -- factors ------------------------------------------------------------------------------

    def unknown(self, size: int, *, guess: bool = False) -> Axis:
        """An axis of `size` elements without a name; with `guess`, its size may name it at the end."""
        if size == 1:
            return ()
        factor = sympy.Dummy(f"size{size}", positive=True, integer=True)
        self._sizes[factor] = sympy.Integer(size)
        if guess:
            self._neighbours[factor] = []
        return (factor,)

    @staticmethod
    def number(size: int) -> Axis:
        """An axis whose size is that number and never gets a name."""
        return () if size == 1 else (sympy.Integer(size),)

    def unknown_shape(self, shape: Iterable[int], *, guess: bool = False) -> Axes:
        return tuple(self.unknown(size, guess=guess) for size in shape)

    def parameter(self, shape: Iterable[int]) -> Axes:
        """The axes of an unnamed input: named by use, else guessed from their sizes and from each other."""
        axes = self.unknown_shape(shape, guess=True)
        for axis in axes:
            for factor in axis:
                self._neighbours[factor] += [other for other in axes if other is not axis]
        self._parameters += axes
        return axes

    def size(self, expression: sympy.Expr) -> int:
        return int(expression.xreplace(self._sizes))

    def size_of(self, axis: Axis) -> int:
        return prod(self.size(factor) for factor in axis)

    def resolved(self, axis: Axis) -> Axis:
        """The axis with every bound placeholder replaced by its value."""
        factors: list[sympy.Expr] = []
        for factor in axis:
            if factor in self._bound:
                factors += self.resolved(self._bound[factor])
            elif bound := factor.free_symbols & self._bound.keys():
                replaced = {symbol: self.product(self.resolved(self._bound[symbol])) for symbol in bound}
                factors.append(factor.xreplace(replaced))
            else:
                factors.append(factor)
        return tuple(factors)

    @staticmethod
    def product(axis: Axis) -> sympy.Expr:
        return sympy.Mul(*axis)

    # -- unification --------------------------------------------------------------------------

    def unify(self, left: Axis, right: Axis) -> Axis:
        """Unify two axes of equal size, as a broadcast or a contraction requires."""
        a, b = self.resolved(left), self.resolved(right)
        if a == b or not b:
            return a
        if not a:
            return b
        if len(a) == len(b) and [self.size(x) for x in a] == [self.size(y) for y in b]:
            return tuple(factor for x, y in zip(a, b, strict=True) for factor in self._equal(x, y))
        if len(a) == 1 and self._bind(a[0], b):
            return b
        if len(b) == 1 and self._bind(b[0], a):
            return a
        return min(a, b, key=lambda axis: self._complexity(self.product(axis)))

    def _equal(self, x: sympy.Expr, y: sympy.Expr) -> Axis:
        if x == y:
            return (x,)
        a, b = self.resolved((x,)), self.resolved((y,))
        if (a, b) != ((x,), (y,)):
            # Another pair of factors of the same axes bound one of these.
            return self.unify(a, b)
        # Keep the placeholder that may be guessed at the end.
        first, second = (x, y) if x not in self._neighbours else (y, x)
        if self._bind(first, (second,)):
            return (second,)
        if self._bind(second, (first,)):
            return (first,)
        return (min(x, y, key=self._complexity),)

    def _bind(self, expression: sympy.Expr, axis: Axis) -> bool:
        """Solve `expression == axis` for the one placeholder in `expression`, if it is a factor of it."""
        placeholders = expression.atoms(sympy.Dummy)
        if len(placeholders) != 1:
            return False
        (placeholder,) = placeholders
        rest = expression / placeholder
        value = axis if rest == 1 else (self.product(axis) / rest,)
        if rest.has(placeholder) or any(factor.has(placeholder) for factor in value):
            return False
        self._bound[placeholder] = value
        for factor in value:
            if factor in self._neighbours:
                self._neighbours[factor] += self._neighbours.get(placeholder, [])
        return True

    @staticmethod
    def _complexity(expression: sympy.Expr) -> tuple[int, bool, int]:
        """Fewest placeholders first, then a name before a number, then the shorter."""
        symbols = expression.free_symbols
        placeholders = sum(isinstance(symbol, sympy.Dummy) for symbol in symbols)
        return placeholders, not symbols, int(expression.count_ops())

    # -- views --------------------------------------------------------------------------------

    def regroup(self, axes: Axes, shape: Sequence[int]) -> Axes:
        """The axes of a row-major view with `shape` of the same elements."""
        if 0 in shape:
            return self.unknown_shape(shape)
        pending = [factor for axis in axes for factor in self.resolved(axis)][::-1]
        grouped: list[Axis] = []
        for wanted in shape:
            taken: list[sympy.Expr] = []
            while pending and (wanted > 1 or (not taken and self.size(pending[-1]) == 1)):
                factor = pending.pop()
                size = self.size(factor)
                if wanted % size == 0:
                    taken.append(factor)
                    wanted //= size
                elif size % wanted == 0:
                    pending += self._split(factor, wanted)[::-1]
                else:
                    return self.unknown_shape(shape)
            grouped.append(self._joined(taken))
        if pending and grouped:
            # Only named dimensions of size 1 can be left over.
            grouped[-1] = (*grouped[-1], *reversed(pending))
        return tuple(grouped)

    def _split(self, factor: sympy.Expr, major: int) -> Axis:
        """Split a factor in two, the first with `major` elements."""
        if factor in self._neighbours and (guess := self._guess(factor)):
            self._bound[factor] = (guess,)
            factor = guess
        parts = sympy.Mul.make_args(factor)
        cuts = {
            sympy.Mul(*chosen)
            for count in range(1, len(parts))
            for chosen in combinations(parts, count)
            if sympy.Mul(*chosen).xreplace(self._sizes) == major
        }
        if len(cuts) == 1:
            (cut,) = cuts
            return (cut, factor / cut)
        minor = self.size(factor) // major
        high, low = self._inner_name(major), self._inner_name(minor)
        if high == low:
            # The number of heads equals their width: the name belongs to the heads, which come first.
            low = None
        if high is None and low is None:
            (high,), (low,) = self.unknown(major), self.unknown(minor)
        elif low is None:
            low = factor / high
        elif high is None:
            high = factor / low
        self._splits.append((high, low, factor))
        return (high, low)

    def _inner_name(self, size: int) -> sympy.Expr | None:
        fitting = [symbol for symbol in self._inner if self._sizes[symbol] == size]
        return fitting[0] if len(fitting) == 1 else None

    def _joined(self, factors: list[sympy.Expr]) -> Axis:
        """The factors, with adjacent parts of a split factor joined again."""
        for high, low, whole in reversed(self._splits):
            pair = [*self.resolved((high,)), *self.resolved((low,))]
            joined = self.resolved((whole,))
            if not self._is_shorter(joined, pair):
                # A use has bound the whole to its parts, or to others.
                continue
            for start in range(len(factors) - 1):
                if factors[start : start + 2] == pair:
                    return self._joined([*factors[:start], *joined, *factors[start + 2 :]])
        return tuple(factors)

    @staticmethod
    def _is_shorter(axis: Iterable[sympy.Expr], other: Iterable[sympy.Expr]) -> bool:
        """Whether an axis has fewer factors than another, or as many with fewer placeholders among them."""
        one, two = ([bool(factor.atoms(sympy.Dummy)) for factor in factors] for factors in (axis, other))
        return (len(one), sum(one)) < (len(two), sum(two))

    def part(self, axis: Axis, size: int) -> Axis:
        """The axis of a slice of `size` elements: a third of `3*D` is `D`."""
        axis = self.resolved(axis)
        if len(axis) == 1 and axis[0] in self._neighbours and (guess := self._guess(axis[0])):
            self._bound[axis[0]] = (guess,)
            axis = (guess,)
        whole = self.size_of(axis)
        if whole == size:
            return axis
        if size > 1 and len(axis) == 1 and whole % size == 0:
            coefficient, rest = axis[0].as_coeff_Mul()
            if rest != 1 and coefficient.is_Integer and coefficient % (whole // size) == 0:
                return (axis[0] / (whole // size),)
        return self.unknown(size)

    def divided(self, axis: Axis, by: int) -> Axis:
        """The axis divided by `by`."""
        return (self.product(self.resolved(axis)) / by,)

    def concatenated(self, axes: Sequence[Axis]) -> Axis:
        return (sympy.Add(*(self.product(self.resolved(axis)) for axis in axes)),)

    # -- guesses ------------------------------------------------------------------------------

    def _guess(self, placeholder: sympy.Dummy, *, by_input: bool = True) -> sympy.Expr | None:
        """A name for an axis that no use has named, from its size, if exactly one candidate fits.

        In this order: a dimension of this size that names no input axis; k times (or a k-th of) a
        neighbouring axis of the same parameter, k ≤ 8; with `by_input`, a dimension of this size that a use has given
        to an axis of a parameter. So 16 channels are not B because the batch is 16.
        """
        size = self.size(placeholder)
        if inner := self._inner_name(size):
            return inner
        readings = set()
        for neighbour in self._neighbours[placeholder]:
            axis = self.resolved(neighbour)
            expression = self.product(axis)
            if not axis or expression.atoms(sympy.Dummy):
                continue
            beside = self.size(expression)
            if not beside or not size:
                continue
            if size % beside == 0 and size // beside <= SMALL_MULTIPLE:
                readings.add(expression * (size // beside))
            elif beside % size == 0 and expression.as_coeff_Mul()[0] % (beside // size) == 0:
                readings.add(expression / (beside // size))
        if readings or not by_input:
            return readings.pop() if len(readings) == 1 else None
        used = {symbol for axis in self._parameters for factor in self.resolved(axis) for symbol in factor.free_symbols}
        same = [symbol for symbol in self.named.values() if self._sizes[symbol] == size]
        return same[0] if len(same) == 1 and same[0] in used else None

    def infer_names(self) -> None:
        """Name split factors by their parts, then guess the other placeholders, the most certain first."""
        by_input = False
        while True:
            self._name_by_parts()
            waiting = (placeholder for placeholder in self._neighbours if placeholder not in self._bound)
            guesses = ((p, guess) for p in waiting if (guess := self._guess(p, by_input=by_input)) is not None)
            found = next(guesses, None)
            if found:
                # One at a time: another axis may be a multiple of this one.
                self._bound[found[0]] = (found[1],)
                by_input = False
            elif by_input:
                return
            else:
                by_input = True

    def _name_by_parts(self) -> None:
        for high, low, whole in reversed(self._splits):
            parts = self.resolved((high, low))
            if not any(part.atoms(sympy.Dummy) for part in parts):
                rest = self.resolved((whole,))
                if len(rest) == 1:
                    self._bind(rest[0], parts)

    def finished(self, axis: Axis, size: int) -> Axis:
        """The axis in names and numbers only; the number `size` if the names do not give it."""
        factors = tuple(f.xreplace({u: self._sizes[u] for u in f.atoms(sympy.Dummy)}) for f in self.resolved(axis))
        return factors if self.size_of(factors) == size else (sympy.Integer(size),)
