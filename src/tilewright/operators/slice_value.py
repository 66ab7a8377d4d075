"""Part of a value along one dimension: the operations behind it are recorded again, over other indices.

    slice_value(x, dim, n, start, step)     the elements start, start + step, … of x: n of them
    picked(x, dim, places)              the elements at computed places

Loads move by an offset and a stride, or take the place as an operand; nothing is stored in between. With `inside` the
part may reach beyond the value: loads happen where that condition holds, and elsewhere the result has no meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import reduce
from math import prod
from operator import add

from tilewright.operators.axes import Axis, Group, Unfusable, group, leaves, strides_of
from tilewright.operators.language import Op, Trace, Value, broadcast, where

CHEAP = frozenset(
    ["load", "const", "index", "check", "cast", "round", "where", "and", "or", "xor", "add", "sub", "mul", "neg", "abs",
     "maximum", "minimum", "lt", "le", "gt", "ge", "eq", "ne", "isnan", "idiv"]
)  # fmt: skip
"""Operations that take less than a load."""


def positions(trace: Trace, extent: int, dim: int, rank: int) -> Value:
    """0, 1, … along `dim`, int64, of a value of `rank` dimensions."""
    return trace.arange(extent).view([extent if d == dim % rank else 1 for d in range(rank)])


def slice_value(value: Value, dim: int, extent: int, start: int, step: int = 1, inside: Value | None = None) -> Value:
    """[…, n, …] → […, extent, …]: element i along `dim` is element `start + i · step` of `value`.

    `inside`: bool, over the new dimension alone: where `start + i · step` is an element. Raises `Unfusable` for a
    random draw, for a dimension that the memory behind it does not walk through with one stride, for one of which a
    reduction behind it covers only some axes, and for a part of a scan that does not begin where the scan does.
    """
    at = dim % len(value.dims)
    new = inside.dims[at] if inside is not None else group(extent)
    old = frozenset(leaves(value.dims[at]))
    dims = (*value.dims[:at], new, *value.dims[at + 1 :])
    moved = _Excerpt(value.trace, value.dims[at], new, start, step, inside).moved(value.id) if old else value.id
    return Value(value.trace, moved, value.dtype, dims)


def picked(value: Value, dim: int, places: Value, inside: Value | None = None) -> Value:
    """[…, n, …] → […, m, …]: elements of `value` at `places`, int64 of as many dimensions, which broadcast.

    `inside`: bool, over dimensions of `places`. Raises `Unfusable` as `slice_value` does.
    """
    at = dim % len(value.dims)
    beside = (*value.dims[:at], (), *value.dims[at + 1 :])
    dims = broadcast(beside, places.dims)
    if not leaves(value.dims[at]):
        return Value(value.trace, value.id, value.dtype, dims)
    moved = _Excerpt(value.trace, value.dims[at], (), 0, 0, inside, places).moved(value.id)
    return Value(value.trace, moved, value.dtype, dims)


def summed(parts: Iterable[tuple[Value, Value | None]]) -> Value:
    """The sum of values, each where its condition holds; None for everywhere."""
    return reduce(add, (part if inside is None else where(inside, part, 0) for part, inside in parts))


MOST_WIDENED = 1.25
"""Times its own elements over which a reduction or a scan may be computed, as a part of a dimension that is longer.

Six sums over the tokens of 32 x 256 x 384 in one concatenation took 48 us of six times as many elements (H200, bf16);
the largest of 20 as half of a concatenation 498 us of 96 MB.
"""
MOST_REPEATED = 200
"""Operations that slices of a value may repeat."""


MANY_READERS = 8
"""Elements of a gather that read one of its operand: what they read is in memory, and not computed for each."""
MOVES = frozenset({"load", "cast", "const", "index"})


def refuse_repeats(value: Value, times: int, dims: int = 2, *, readers: int = 1) -> None:
    """Raise `Unfusable` where so many slices over the last `dims` dimensions would compute too much again.

    `readers`: how many elements of each slice_value read one of the value, in the mean.
    """
    axes = frozenset(leaves(axis for dim in value.dims[-dims:] for axis in dim))
    again = [value.trace.ops[position] for position in _varying(value.trace, value.id, axes)]
    dear = any(op.name not in CHEAP for op in again)
    if times > 1 and (dear or times * len(again) > MOST_REPEATED):
        raise Unfusable(f"an operand would be computed {times} times")
    if readers >= MANY_READERS and any(op.name not in MOVES for op in again):
        raise Unfusable(f"an operand would be computed {readers} times")


def bounds(size: int, start: int | None, end: int | None) -> tuple[int, int]:
    """A slice's first element and the one after its last, both in [0, size]."""
    first = 0 if start is None else start + size if start < 0 else start
    last = size if end is None else end + size if end < 0 else end
    first = min(max(first, 0), size)
    return first, max(min(last, size), first)


class _Excerpt:
    def __init__(
        self,
        trace: Trace,
        old: Group,
        new: Group,
        start: int,
        step: int,
        inside: Value | None,
        places: Value | None = None,
    ) -> None:
        self.trace = trace
        self.old = leaves(old)
        self.new, self.start, self.step, self.inside, self.places = new, start, step, inside, places
        self.found: dict[int, int] = {}

    def moved(self, wanted: int) -> int:
        """Where operation `wanted` is now; those that do not vary with the dimension stay."""
        varying = _varying(self.trace, wanted, frozenset(self.old))
        if len(varying) > MOST_REPEATED:
            raise Unfusable(f"a part of what {len(varying)} operations compute")
        for position in varying:
            op = self.trace.ops[position]
            args = tuple(self.found.get(a, a) for a in op.args)
            self.found[position] = self._again(op, args)
        return self.found.get(wanted, wanted)

    def _again(self, op: Op, args: tuple[int, ...]) -> int:
        if op.name == "draw":
            raise Unfusable("only a part of a random tensor is read, but all its numbers must be drawn")
        begins = op.name == "scan" and _reduced(op) == set(self.old) and self._from_the_first()
        if op.name in ("reduce", "scan"):
            if _reduced(op) & set(self.old) and not begins:
                raise Unfusable("it slices a dimension along which a scan or a partial reduction runs")
            if self._widened() > MOST_WIDENED:
                raise Unfusable(f"a reduction would be computed over {self._widened():.3g} times its elements")
        if begins:
            return self._scan(op, args)
        if op.name == "index":
            return self._index(op)
        if op.name == "load":
            args, op = self._load(op, args)
        if op.name == "check" and self.inside is not None:
            args = (args[0], self._within(args[1:]))
        return self._put(replace(op, args=args))

    def _from_the_first(self) -> bool:
        """Whether the part holds the first elements, in order and without gaps, maybe after places outside of it."""
        return self.step == 1 and self.places is None and self.start <= 0

    def _scan(self, op: Op, args: tuple[int, ...]) -> int:
        """The scan over the new dimension, to which places outside of the value add nothing."""
        kind, _ = op.detail
        if not leaves(self.new):
            return args[0]
        if self.inside is not None:
            nothing = self._constant(1 if kind == "prod" else 0, op.dtype)
            args = (self._put(Op("where", (self.inside.id, *args, nothing), op.dtype)),)
        return self._put(replace(op, args=args, detail=(kind, self.new)))

    def _widened(self) -> float:
        """The new dimension's elements for each of the old one's."""
        return prod(axis.extent for axis in leaves(self.new)) / max(prod(axis.extent for axis in self.old), 1)

    def _put(self, op: Op) -> int:
        self.trace.ops.append(op)
        return len(self.trace.ops) - 1

    def _stride(self, strides: dict[Axis, int]) -> int:
        """The one stride with which these strides walk through the dimension."""
        innermost = self.old[-1]
        expected = strides.get(innermost, 0)
        for axis in reversed(self.old):
            if strides.get(axis, 0) != expected:
                raise Unfusable("the dimension that is sliced has no single stride in memory")
            expected *= axis.extent
        return strides.get(innermost, 0)

    def _load(self, op: Op, args: tuple[int, ...]) -> tuple[tuple[int, ...], Op]:
        source = op.detail
        strides = strides_of(source.dims, source.strides)
        stride = self._stride(strides)
        kept = {axis: step for axis, step in strides.items() if axis not in self.old}
        indices, condition = args[: len(source.by)], args[len(source.by) :]
        by = source.by
        if self.places is not None and stride:
            indices, by = (*indices, self.places.id), (*by, stride)
        moved = replace(
            source,
            dims=(*((axis,) for axis in kept), self.new),
            strides=(*kept.values(), stride * self.step),
            offset=source.offset + stride * self.start,
            by=by,
        )
        if self.inside is not None:
            condition = (self._within(condition),)
        return (*indices, *condition), replace(op, detail=moved)

    def _within(self, condition: tuple[int, ...]) -> int:
        """`inside`, and the condition that an operation has already."""
        assert self.inside is not None
        return self._put(Op("and", (*condition, self.inside.id), "bool")) if condition else self.inside.id

    def _index(self, op: Op) -> int:
        """`factor · i + start` of the new index i."""
        strides = strides_of([op.detail], [1])
        if set(strides) - set(self.old):
            raise Unfusable("the dimension that is sliced was merged with others into one loop")
        factor = self._stride(strides)
        if self.places is not None:
            return (
                self.places.id
                if factor == 1
                else self._put(Op("mul", (self.places.id, self._constant(factor, op.dtype)), op.dtype))
            )
        place = self._put(Op("index", (), op.dtype, self.new)) if self.new else self._constant(0, op.dtype)
        for name, number in (("mul", factor * self.step), ("add", factor * self.start)):
            if number != (name == "mul"):
                place = self._put(Op(name, (place, self._constant(number, op.dtype)), op.dtype))
        return place

    def _constant(self, number: int, dtype: str) -> int:
        return self._put(Op("const", (), dtype, number))


def _behind(trace: Trace, wanted: int) -> set[int]:
    """`wanted` and all that it is computed from."""
    found: set[int] = set()
    todo = [wanted]
    while todo:
        position = todo.pop()
        if position not in found:
            found.add(position)
            todo.extend(trace.ops[position].args)
    return found


def _varying(trace: Trace, wanted: int, axes: frozenset[Axis]) -> list[int]:
    """Of `wanted` and what it is computed from, in order, what varies with any of these axes.

    A reduction over only some of them varies with the others.
    """
    along: dict[int, frozenset[Axis]] = {}
    for position in sorted(_behind(trace, wanted)):
        op = trace.ops[position]
        own = frozenset[Axis]()
        if op.name == "load":
            strides = strides_of(op.detail.dims, op.detail.strides)
            own = frozenset(axis for axis, stride in strides.items() if stride)
        elif op.name == "index":
            own = frozenset(leaves(op.detail))
        elif op.name == "draw":
            own = frozenset(leaves(op.detail.axes))
        elif op.name == "scan":
            own = _reduced(op)
        found = (own & axes).union(*(along[a] for a in op.args))
        along[position] = found - _reduced(op) if op.name == "reduce" else found
    return [position for position, found in along.items() if found]


def _reduced(op: Op) -> frozenset[Axis]:
    """The axes that a reduction or a scan runs over."""
    return frozenset(leaves(op.detail[1]))
