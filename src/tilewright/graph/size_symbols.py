"""The symbols of a graph with symbolic sizes, as plain data: where a call's inputs give them, and what is made of them.

x: [s0, 20], n: s1, view(x, [s0 * 5, 4])   →   s0 is dimension 0 of input 0, s1 is input 1; sizes s0, s1, s0 * 5
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from random import Random
from typing import Any

import sympy
import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from tilewright.graph.calls import is_known
from tilewright.graph.size_expressions import FUNCTIONS, Expressions
from tilewright.graph.specialise import SymbolicValue, reads_offsets
from tilewright.pytorch.sizes import as_python
from tilewright.records.recipe import Layout

Sizes = tuple[int, ...]
"""A value for each symbol."""
POINTS = 4
"""For so many sizes a program is planned, to see which of its integers are made of the symbols, and how."""
SPREAD = ((0.8, 1.25), (0.8, 1.25), (0.6, 1.7), (0.6, 1.7), (0.6, 1.7), (0.4, 2.5), (0.4, 2.5), (1, 5), (1, 5))
"""Between which multiples of a call's sizes those are looked for, one after the other."""
NEAR = 200
"""How far from there."""
FAR = 16
"""A size this many times those planned for, or this part of them, gets a program of its own: other kernels are faster.
"""
TRIES = 24
"""How often other ones are drawn if an expression has the values of another one."""
OTHERS = 32
"""At so many other sizes expressions are compared that have the same values for those planned."""


@dataclass(frozen=True)
class SizeSymbols:
    """The symbols of one graph; expressions are Python's over s0, s1, …"""

    places: tuple[tuple[int, int], ...]
    """For each symbol an input that has it: the input's place, and the dimension, or -1 if it is an integer."""
    inputs: tuple[tuple[tuple[str, ...], tuple[str, ...]] | str | None, ...]
    """Shape and strides of each input tensor of symbolic size, an integer's expression; None for other inputs."""
    extents: tuple[str, ...]
    """The symbolic extents of all tensors of the graph."""
    numbers: tuple[str, ...]
    """Other symbolic numbers of the graph: strides, counts of elements, values."""
    conditions: tuple[str, ...]
    """What holds of the symbols in every call."""
    constants: frozenset[int]
    """The graph's other integers."""

    def __getstate__(self) -> dict[str, Any]:
        return {each.name: getattr(self, each.name) for each in fields(self)}

    @cached_property
    def read(self) -> Callable[[Sequence[Any]], Sizes]:
        """The values that a call's inputs give the symbols."""
        found = (f"x[{i}]" if axis < 0 else f"x[{i}].shape[{axis}]" for i, axis in self.places)
        return eval(f"lambda x: ({', '.join(found)},)")  # type: ignore[no-any-return]

    def evaluator(self, texts: Sequence[str]) -> Callable[..., tuple[int, ...]]:
        """A function of the symbols that returns the values of these expressions."""
        names = ", ".join(f"s{number}" for number in range(len(self.places)))
        return eval(f"lambda {names}: ({''.join(text + ', ' for text in texts)})", dict(FUNCTIONS))  # type: ignore[no-any-return]

    @cached_property
    def _extents(self) -> Callable[..., tuple[int, ...]]:
        return self.evaluator(self.extents)

    @cached_property
    def _conditions(self) -> Callable[..., tuple[int, ...]]:
        return self.evaluator(self.conditions)

    @cached_property
    def _numbers(self) -> Callable[..., tuple[int, ...]]:
        return self.evaluator(self.numbers)

    @staticmethod
    def _at(function: Callable[..., tuple[int, ...]], sizes: Sizes) -> tuple[int, ...] | None:
        """The values at some sizes; None where one divides by 0, as `64 % (s0 // 5)` does for an s0 below 5."""
        try:
            return function(*sizes)
        except ZeroDivisionError:
            return None

    def _are_possible(self, sizes: Sizes) -> bool:
        """Whether the conditions hold and every number has a value."""
        conditions = self._at(self._conditions, sizes)
        return conditions is not None and all(conditions) and self._at(self._numbers, sizes) is not None

    def are_general(self, sizes: Sizes) -> bool:
        """Whether no extent is 0 or 1: PyTorch and the passes treat such tensors specially."""
        # The ragged size of a nested tensor is no number.
        if not all(isinstance(size, int) for size in sizes):
            return False
        extents = self._at(self._extents, sizes)
        return extents is not None and all(extent > 1 for extent in extents)

    def inputs_at(self, sizes: Sizes, args: Sequence[Any]) -> list[Any]:
        """The inputs `args` of a call with other sizes: layouts in place of the tensors that change."""
        made = list(args)
        for place, found in enumerate(self.inputs):
            if isinstance(found, str):
                (made[place],) = self.evaluator([found])(*sizes)
            elif found is not None:
                shape, strides = (self.evaluator(part)(*sizes) for part in found)
                made[place] = Layout(shape, strides, args[place].dtype, args[place].device)
        return made

    def moduli(self) -> list[Sizes]:
        """Sizes with equal remainders by one of these share a program, the first for which they can: any sizes; those
        that are even, or odd, along one symbol (windows that do not divide an image); along all."""
        count = len(self.places)
        alone = [tuple(1 + (place == number) for place in range(count)) for number in range(count)]
        return [(1,) * count, *(alone if count > 1 else []), (2,) * count]

    def points(self, sizes: Sizes, moduli: Sizes) -> list[Sizes]:
        """Sizes near those of a call, by which all sizes of the graph can be told apart: prime or twice a prime if the
        conditions allow it; no two extents nor an extent and a constant are equal by chance. They have the remainders
        of `sizes` by the moduli. Few if there are no such sizes."""
        drawn = Random(0)
        others = self._others([sizes], moduli)
        every = [self._extents(*other) for other in others]
        distinct = max((len(set(extents)) for extents in every), default=0)
        # `s0 // (s0 // 5)` of an s0 that 5 divides is 5 at all sizes, and not by chance.
        changing = [n for n in range(len(self.extents)) if len({extents[n] for extents in every}) != 1]
        for _ in range(TRIES):
            found: list[Sizes] = []
            for least, most in SPREAD:
                start = [max(round(size * drawn.uniform(least, most)), 3) for size in sizes]
                for point in self._drawn(start, sizes, moduli, drawn, is_first=not found):
                    is_new = all(a != b for other in found for a, b in zip(point, other, strict=True))
                    if is_new and self._is_generic(point, distinct, changing):
                        found.append(point)
                        break
                if len(found) == POINTS:
                    break
            points = sorted(found)
            if len(points) < POINTS or self.expressions(points, moduli).are_distinct:
                break
        return points

    def _drawn(
        self, start: Sequence[int], sizes: Sizes, moduli: Sizes, drawn: Random, *, is_first: bool
    ) -> Iterator[Sizes]:
        """Sizes at and above `start`, nearest first, with the remainders of `sizes`; primes and their doubles first."""
        for are_prime in (True, False):
            for distance in range(NEAR):
                point = [size + drawn.randint(0, distance // 4 + 1) for size in start]
                if are_prime:
                    # One of the points has even sizes, which a half of them, rounded down, tells apart.
                    even = [n % 2 == 0 if modulus > 1 else is_first for n, modulus in zip(sizes, moduli, strict=True)]
                    point = list(map(_near_prime, point, even))
                if remainders(point, moduli) == remainders(sizes, moduli):
                    yield tuple(point)

    def _is_generic(self, point: Sizes, distinct: int, changing: Sequence[int]) -> bool:
        extents = self._at(self._extents, point)
        return (
            extents is not None
            and min(extents, default=2) > 1
            and len(set(extents)) >= distinct
            and len(set(point)) == len(point)
            and not self.constants & {extents[number] for number in changing}
            and self._are_possible(point)
        )

    def _others(self, points: Sequence[Sizes], moduli: Sizes) -> list[Sizes]:
        """Sizes of all orders that meet the conditions."""
        drawn, others = Random(0), list[Sizes]()
        for _ in range(NEAR):
            other = tuple(max(int(size * FAR ** drawn.uniform(-1, 1)), 2) for size in drawn.choice(points))
            shift = remainders(tuple(n - known for n, known in zip(other, points[0], strict=True)), moduli)
            other = tuple(n - more for n, more in zip(other, shift, strict=True))
            if len(others) < OTHERS and self.are_general(other) and self._are_possible(other):
                others.append(other)
        return others

    def expressions(self, points: Sequence[Sizes], moduli: Sizes) -> Expressions:
        """Finds how integers that have some values at these points are made of the symbols."""
        texts = (*self.extents, *self.numbers)
        at = [self.evaluator(texts)(*point) for point in (*points, *self._others(points, moduli))]
        return Expressions(texts, [tuple(values) for values in zip(*at, strict=True)], len(points))


def size_symbols(graph: fx.Graph) -> SizeSymbols | None:
    """The symbols of a graph; None if one depends on data, is no input's own size, or the graph reads offsets."""
    values = [leaf for node in graph.nodes for leaf in tree_leaves(node.meta.get("val"))]
    if reads_offsets(graph) or any(isinstance(value, SymbolicValue) for value in values):
        return None
    if any(not is_known(size) for value in values for size in (*_extents(value), *_numbers(value))):
        return None
    inputs = [node.meta.get("val") for node in graph.find_nodes(op="placeholder")]
    places: dict[sympy.Symbol, tuple[int, int]] = {}
    for place, value in enumerate(inputs):
        for axis, size in enumerate(value.shape) if isinstance(value, torch.Tensor) else [(-1, value)]:
            if isinstance(size, torch.SymInt) and isinstance(size.node.expr, sympy.Symbol):
                places.setdefault(size.node.expr, (place, axis))
    texts = _Texts(list(places))
    extents = texts.of(size for value in values for size in _extents(value))
    numbers = texts.of(size for value in values for size in _numbers(value))
    if texts.has_others or not places:
        return None
    sizes = (size for value in values for size in (*_extents(value), *_numbers(value)))
    environment = next(size.node.shape_env for size in sizes if isinstance(size, torch.SymInt))
    return SizeSymbols(
        tuple(places.values()),
        tuple(map(texts.of_input, inputs)),
        extents,
        tuple(text for text in numbers if text not in extents),
        tuple(texts.conditions(environment)),
        frozenset(leaf for node in graph.nodes for leaf in tree_leaves(node.args) if type(leaf) is int)
        | {size for value in values for size in (*_extents(value), *_numbers(value)) if type(size) is int},
    )


def _extents(value: object) -> Sequence[int | torch.SymInt]:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else ()


def _numbers(value: object) -> Sequence[int | torch.SymInt | torch.SymFloat]:
    if isinstance(value, torch.Tensor):
        return (*value.stride(), value.numel()) if value.layout is torch.strided else ()
    return [value] if isinstance(value, (int, torch.SymInt, torch.SymFloat)) else []


class _Texts:
    """Expressions over these symbols as Python's."""

    def __init__(self, symbols: Sequence[sympy.Symbol]) -> None:
        self.names = {symbol: sympy.Symbol(f"s{number}", integer=True) for number, symbol in enumerate(symbols)}
        self.has_others = False

    def of(self, sizes: Iterator[int | torch.SymInt | torch.SymFloat]) -> tuple[str, ...]:
        symbolic = (size for size in sizes if isinstance(size, (torch.SymInt, torch.SymFloat)))
        return tuple(dict.fromkeys(self.text(size.node.expr) for size in symbolic))

    def text(self, expression: Any) -> str:
        self.has_others |= bool(expression.free_symbols - self.names.keys())
        return as_python(expression.xreplace(self.names))

    def of_input(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor) and value._has_symbolic_sizes_strides:
            return tuple(tuple(self._number(n) for n in part) for part in (value.shape, value.stride()))
        return self._number(value) if isinstance(value, torch.SymInt) else None

    def _number(self, size: int | torch.SymInt) -> str:
        return self.text(size.node.expr) if isinstance(size, torch.SymInt) else str(size)

    def conditions(self, environment: Any) -> Iterator[str]:
        for guard in environment.guards:
            if not guard.expr.free_symbols - self.names.keys():
                yield self.text(guard.expr)
        for symbol, name in self.names.items():
            known = environment.var_to_range.get(symbol)
            if known is not None:
                yield f"{name} >= {known.lower}" if known.lower.is_Integer else "True"
                yield f"{name} <= {known.upper}" if known.upper.is_Integer else "True"


def remainders(sizes: Sequence[int], moduli: Sizes) -> Sizes:
    return tuple(size % modulus for size, modulus in zip(sizes, moduli, strict=True))


def _near_prime(number: int, is_even: bool) -> int:
    """The next prime number, or double a prime."""
    return 2 * int(sympy.nextprime(number // 2 - 1)) if is_even else int(sympy.nextprime(number - 1))
