"""Range analysis of integers before a kernel runs: the least and the largest value of each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

from tilewright.operators.axes import size
from tilewright.operators.language import Op, Value

Range = tuple[int, int]
STORED: dict[str, Range] = {"bool": (0, 1), "uint8": (0, 255)} | {
    f"int{bits}": (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) for bits in (8, 16, 32, 64)
}
"""The smallest and the largest value of each dtype."""
CORNERS: dict[str, Callable[[int, int], int]] = {
    "add": int.__add__, "sub": int.__sub__, "mul": int.__mul__, "minimum": min, "maximum": max,
}  # fmt: skip
"""Functions of two numbers whose extremes are at the extremes of both."""


def range_of(value: Value) -> Range | None:
    """The least and the most that an integer or a bool can be; None for a float.

    What exceeds its dtype on the way could wrap around, and is taken for anything that the dtype holds.

    >>> from tilewright.operators.language import Trace
    >>> trace = Trace()
    >>> place = trace.arange(10) - 3
    >>> range_of(place), range_of(place._call("maximum", 0))
    ((-3, 6), (0, 6))
    """
    return _Ranges(value.trace.ops).of(value.id)


class _Ranges:
    def __init__(self, ops: Sequence[Op]) -> None:
        self.ops = ops
        self.known: dict[int, Range | None] = {}

    def of(self, position: int) -> Range | None:
        """Operands come before what reads them: those missing are found in order, not by recursion."""
        todo = [position]
        while todo:
            missing = [a for a in self.ops[todo[-1]].args if a not in self.known]
            if missing:
                todo += missing
            else:
                place = todo.pop()
                self.known[place] = self._bounded(self.ops[place])
        return self.known[position]

    def _bounded(self, op: Op) -> Range | None:
        held = STORED.get(op.dtype)
        found = self._found(op) if held is not None else None
        return found if found and held and held[0] <= found[0] and found[1] <= held[1] else held

    def _found(self, op: Op) -> Range | None:
        if op.name == "const":
            return int(op.detail), int(op.detail)
        if op.name == "index":
            return 0, size(op.detail) - 1
        if op.name == "check":
            return 0, int(op.detail) - 1
        # The indices of a load say nothing about the loaded value.
        return computed(op.name, [self.known[a] for a in op.args]) if op.name != "load" else None


def computed(name: str, given: Sequence[Range | None]) -> Range | None:
    """The least and the most of a function of whole numbers, by those of its operands; None where they are unknown."""
    if name == "where":
        # A condition's operand has a range, too.
        return _union(given[1:])
    if name == "cast":
        return given[0]
    known = [r for r in given if r]
    if not known or len(known) < len(given):
        return None
    low, high = known[0]
    if name == "neg":
        return -high, -low
    if name == "idiv":
        # Kernels round towards zero.
        least, most = known[1]
        return (min(low, 0) // least, max(high, 0) // least) if least == most > 0 else None
    if name in CORNERS and len(known) == 2:
        found = [CORNERS[name](a, b) for a, b in product(*known)]
        return min(found), max(found)
    return None


def _union(ranges: Sequence[Range | None]) -> Range | None:
    known = [r for r in ranges if r]
    return (min(r[0] for r in known), max(r[1] for r in known)) if len(known) == len(ranges) else None
