"""How numbers of plans for several sizes are made of the sizes: by their values there.

88, 136, 176, 232   for s0 = 11, 17, 22, 29   →   s0 * 8
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from itertools import combinations, combinations_with_replacement
from typing import Any

import torch

Number = int | float


def _float32(number: float) -> float:
    """The nearest number of fp32."""
    nearest: float = struct.unpack("f", struct.pack("f", number))[0]
    return nearest


FUNCTIONS: dict[str, Any] = {
    "math": math,
    "min": min,
    "max": max,
    "abs": abs,
    "int": int,
    "float": float,
    "float32": _float32,
    "round": round,
    "torch": torch,
}
"""What expressions call."""


class Expressions:
    """Numbers by their values at the points for which a graph is planned."""

    def __init__(self, texts: Sequence[str], values: Sequence[tuple[Number, ...]], points: int) -> None:
        self.points = points
        every = [(f"({text})", found) for text, found in zip(texts, values, strict=True)]
        self.pool = [(text, found) for text, found in every if len(set(found[:points])) > 1]
        """Sizes of the graph, with their values at the points, and at other sizes that meet its conditions."""
        self.fixed = [(text, found) for text, found in every if len(set(found[:points])) == 1]
        """Those that are the same at all points."""
        self.integers: list[tuple[str, tuple[Any, ...]]] = [
            (text, found) for text, found in self.pool if not any(isinstance(value, float) for value in found)
        ]
        self.products: list[tuple[str, tuple[Any, ...]]] = self.integers + [
            (f"{a} * {b}", tuple(x * y for x, y in zip(left, right, strict=True)))
            for (a, left), (b, right) in combinations_with_replacement(self.integers, 2)
        ]

    @property
    def are_distinct(self) -> bool:
        return all(self.of(known[: self.points]) is not None for _, known in self.pool)

    @property
    def same(self) -> tuple[list[str], list[str]]:
        """The graph's sizes, and as what they count in its program: a maximum may be either operand."""
        found = [(text, self.of(values[: self.points]) or text) for text, values in self.pool]
        found += [(text, repr(values[0])) for text, values in self.fixed]
        return [text for text, _ in found], [other for _, other in found]

    def of(self, values: Sequence[Number]) -> str | None:
        """The expression with these values at the points: a multiple of a size or of a product of two, that and a
        constant, or a sum of such multiples; for a float, one of the graph, a multiple or quotient of a size, or the
        reciprocal of such an integer, which may be rounded to fp32. None if there is none, or if there are several that
        differ at other sizes."""
        found: Sequence[tuple[str, tuple[Number, ...]]]
        if isinstance(values[0], float):
            found = list(self._fractions(values)) or list(self._reciprocals(values))
        else:
            found = self._integers(values)
        return found[0][0] if len({known for _, known in found}) == 1 else None

    def _integers(self, values: Sequence[Number]) -> list[tuple[str, tuple[int, ...]]]:
        found = [*self._multiples(values), *self._shifted(values, self.integers)]
        return found or list(self._shifted(values, self.products)) or list(self._sums(values))

    def _fractions(self, values: Sequence[Number]) -> Iterator[tuple[str, tuple[Number, ...]]]:
        for text, known in self.pool:
            if self._are(known, values):
                yield text, known
                return
        for text, known in self.products:
            over, times = round(values[0] * known[0]), values[0] / known[0]
            if self._are(divided := tuple(over / f for f in known), values):
                yield f"{over} / ({text})", divided
            elif self._are(multiplied := tuple(f * times for f in known), values):
                yield f"{text} * {times!r}", multiplied

    def _reciprocals(self, values: Sequence[Number]) -> Iterator[tuple[str, tuple[Number, ...]]]:
        if not all(0 < abs(value) <= 0.5 for value in values):
            return
        wholes = [round(1 / value) for value in values]
        for rounded in ("float", "float32"):
            if all(FUNCTIONS[rounded](1 / whole) == value for whole, value in zip(wholes, values, strict=True)):
                for text, known in self._integers(wholes):
                    yield f"{rounded}(1 / ({text}))", known
                return

    def _are(self, known: Sequence[Number], values: Sequence[Number]) -> bool:
        return tuple(known[: self.points]) == tuple(values)

    def _multiples(self, values: Sequence[Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        for text, known in self.products:
            if known[0] and all(
                v * known[0] == values[0] * f for v, f in zip(values, known[: self.points], strict=True)
            ):
                common = math.gcd(values[0], known[0])
                times, by = values[0] // common, known[0] // common
                if not any(f * times % by for f in known):
                    scaled = text if times == 1 else f"{text} * {times}"
                    yield scaled if by == 1 else f"{scaled} // {by}", tuple(f * times // by for f in known)

    def _shifted(self, values: Sequence[Any], pool: Sequence[tuple[str, Any]]) -> Iterator[tuple[str, tuple[int, ...]]]:
        for text, known in pool:
            if known[1] == known[0] or values[1] == values[0]:
                continue
            common = math.gcd(values[1] - values[0], known[1] - known[0])
            times, by = (values[1] - values[0]) // common, (known[1] - known[0]) // common
            if by < 0:
                times, by = -times, -by
            shift = values[0] - times * known[0] // by
            shifted = tuple(times * f // by + shift for f in known)
            if self._are(shifted, values) and not any(times * f % by for f in known):
                yield f"{text} * {times}{'' if by == 1 else f' // {by}'} + {shift}", shifted

    def _sums(self, values: Sequence[Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
        for (a, left), (b, right) in combinations(self.integers, 2):
            scale = left[0] * right[1] - left[1] * right[0]
            first, second = (values[0] * right[1] - values[1] * right[0], left[0] * values[1] - left[1] * values[0])
            if not scale or first % scale or second % scale:
                continue
            first, second = first // scale, second // scale
            if self._are(summed := tuple(first * x + second * y for x, y in zip(left, right, strict=True)), values):
                yield f"{a} * {first} + {b} * {second}", summed
