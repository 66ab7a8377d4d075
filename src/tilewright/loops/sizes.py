"""Plain data of several sizes as one: numbers that differ between the sizes become arguments.

    rows (33,), stride 64   and   rows (70,), stride 64   →   rows (n0,), stride 64, where n0 is 33 or 70

Nests, layouts and steps of an executable are compared so. Where anything but a number differs, the sizes cannot
share a kernel or a program.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch

from tilewright.loops.nest import Buffer, Nest, nameless

Number = int | float


class NotAlike(Exception):
    """Two sizes of a program differ in more than numbers; the message says where."""


_for_all_sizes: ContextVar[bool] = ContextVar("tilewright_for_all_sizes", default=False)


@contextmanager
def for_all_sizes() -> Iterator[None]:
    """In this block kernels are lowered with the checks that some sizes need, so that those of several are alike."""
    token = _for_all_sizes.set(True)
    try:
        yield
    finally:
        _for_all_sizes.reset(token)


def are_for_all_sizes() -> bool:
    """Whether `for_all_sizes` is on."""
    return _for_all_sizes.get()


class _Named:
    """A number that prints as its name or, after arithmetic, as its expression."""

    text: str
    number: int
    """Which argument of a kernel or a program it is; -1 after arithmetic."""

    def __repr__(self) -> str:
        return self.text

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return self.text


class Size(_Named, int):
    """An integer that differs between sizes. It counts as its value for one of the sizes."""

    plus: int
    """What is added to the argument."""

    def __new__(cls, value: int, text: str, number: int = -1, plus: int = 0) -> Size:
        made = super().__new__(cls, value)
        made.text = text
        made.number = number
        made.plus = plus
        return made

    def __mul__(self, other: int) -> int:
        return self._times(other, f"({self} * {other})")

    def __rmul__(self, other: int) -> int:
        return self._times(other, f"({other} * {self})")

    def _times(self, other: int, text: str) -> int:
        return self if int(other) == 1 else type(self)(int(self) * int(other), text)


class GivenSize(Size):
    """A size of one call, in the source of a kernel that is printed for it. Kernels of several sizes are one if they
    print the same, so what is decided by its value is right; a product past 32 bits prints as its value, since the
    kernel would compute it in 32."""

    def _times(self, other: int, text: str) -> int:
        product = int(self) * int(other)
        return super()._times(other, text) if abs(product) < 2**31 else product


class Factor(_Named, float):
    """The same for a number that is no integer, such as the reciprocal of a size."""

    def __new__(cls, value: float, text: str, number: int = -1) -> Factor:
        made = super().__new__(cls, value)
        made.text = text
        made.number = number
        return made


class Arguments:
    """The numbers that differ: one argument for each tuple of values by size. `with_offsets`, an integer that is always
    as much more than an earlier one is no argument of its own: `n5 + 1` beside `n5` tells g++ that the elements of a
    window are neighbours."""

    def __init__(self, *, with_offsets: bool = False) -> None:
        self.values: dict[tuple[Number, ...], int] = {}
        """By values: the argument's number."""
        self.with_offsets = with_offsets
        self.by_differences: dict[tuple[Number, ...], tuple[Number, ...]] = {}
        """The first argument whose values differ so from size to size."""

    def argument(self, values: tuple[Number, ...]) -> Number:
        # 0.0 equals -0.0, and no NaN equals another.
        if len(set(map(repr, values))) == 1:
            return values[0]
        middle = values[len(values) // 2]
        if isinstance(middle, float):
            number = self.values.setdefault(values, len(self.values))
            return Factor(middle, f"((const double*)sizes)[{number}]", number)
        base = values
        if self.with_offsets:
            base = self.by_differences.setdefault(tuple(value - values[0] for value in values), values)
        number = self.values.setdefault(base, len(self.values))
        plus = int(values[0] - base[0])
        text = f"(n{number} {'-' if plus < 0 else '+'} {abs(plus)})" if plus else f"n{number}"
        return Size(middle, text, number, plus)


def in_64_bits(numbers: Sequence[Number]) -> list[int]:
    """Arguments of a kernel as it reads them: an integer, or the bits of a double."""
    kinds = "".join("d" if isinstance(number, float) else "q" for number in numbers)
    return list(struct.unpack(f"{len(kinds)}q", struct.pack(kinds, *numbers)))


VECTOR = 16
"""Kernels on a GPU are apart for sizes that are multiples of this and for others, as for addresses."""


def given(values: Sequence[Number]) -> tuple[list[Number], list[Number]]:
    """The numbers in a kernel that is printed for these values of its arguments, and what a launch passes for them:

    48, 50, 0.125   →   (size0 * 16), size1, size2   and   3, 50, 0.125
    """
    named, passed = list[Number](), list[Number]()
    for number, value in enumerate(values):
        name = f"size{number}"
        if isinstance(value, float):
            named.append(Factor(value, name, number))
            passed.append(value)
        elif abs(value) >= 2**31:
            # It prints as its value.
            named.append(value)
            passed.append(0)
        else:
            times = VECTOR if value % VECTOR == 0 else 1
            named.append(GivenSize(value, name if times == 1 else f"({name} * {times})", number))
            passed.append(value // times)
    return named, passed


def may_exceed(extent: int, most: int) -> bool:
    """Whether an extent is larger than `most` at one of the sizes."""
    return isinstance(extent, Size) or extent > most


def of_all_sizes(
    nests: Sequence[Nest], name: str, *, with_offsets: bool = False
) -> tuple[Nest, list[tuple[Number, ...]]]:
    """The nests of the kernel `name` at several sizes as one without names, and the values of its arguments. Raises
    NotAlike."""
    found = Arguments(with_offsets=with_offsets)
    bare = [
        replace(nest, inputs=_uncounted(nest.inputs), outputs=_uncounted(nest.outputs)) for nest in map(nameless, nests)
    ]
    nest: Nest = alike(bare, found.argument, f"the kernel {name}")
    return replace(nest, argument_dtypes=tuple(map(_dtype, found.values))), list(found.values)


def _dtype(values: tuple[Number, ...]) -> str:
    return "float64" if isinstance(values[0], float) else "int32"


def _uncounted(buffers: Sequence[Buffer]) -> tuple[Buffer, ...]:
    return tuple(replace(buffer, elements=0) for buffer in buffers)


def alike(values: Sequence[Any], number: Callable[[tuple[Number, ...]], Number], where: str = "") -> Any:
    """The values of several sizes as one, with `number` of the numbers in each place. Raises NotAlike."""
    first = values[0]
    kind = type(first)
    if any(type(value) is not kind for value in values):
        raise NotAlike(f"{where} is of several classes")
    if kind is int or kind is float:
        return number(tuple(values))
    if isinstance(first, (tuple, list, dict)):
        if any(len(value) != len(first) for value in values):
            raise NotAlike(f"{where} has several lengths")
        if isinstance(first, dict):
            return {key: alike([value[key] for value in values], number, where) for key in first}
        return _rebuilt(first, [alike(each, number, where) for each in zip(*values, strict=True)])
    if is_dataclass(first) and not isinstance(first, type):
        names = [field.name for field in fields(first) if field.init]
        changed = {name: alike([getattr(value, name) for value in values], number, f"{where}.{name}") for name in names}
        return replace(first, **changed)
    if any(value is not first for value in values) and not _equal(values):
        raise NotAlike(f"{where} differs: {', '.join(map(str, values))}")
    return first


def _rebuilt(old: Any, parts: list[Any]) -> Any:
    """A tuple or list of the class of `old`."""
    return old._make(parts) if hasattr(old, "_make") else type(old)(parts)


def _equal(values: Sequence[Any]) -> bool:
    first, *others = values
    if isinstance(first, torch.Tensor):
        return all(x.shape == first.shape and x.dtype == first.dtype and torch.equal(x, first) for x in others)
    if isinstance(first, partial):
        return all((x.func, x.args, x.keywords) == (first.func, first.args, first.keywords) for x in others)
    return all(bool(x == first) for x in others)


def filled(value: Any, values: Sequence[Number]) -> Any:
    """`value` with these numbers in the places of its arguments; parts without arguments are shared."""
    fill = filler(value)
    return value if fill is None else fill(values)


Filler = Callable[[Sequence[Number]], Any]


def filler(value: Any) -> Filler | None:
    """The function that gives `value` with numbers in the places of its arguments; None if it has none. It looks only
    at parts that have some."""
    if isinstance(value, Size) and value.plus:
        return lambda values: values[value.number] + value.plus
    if isinstance(value, (Size, Factor)):
        return itemgetter(value.number)
    if isinstance(value, (tuple, list)):
        return _filler(value, enumerate(value), list, partial(_rebuilt, value))
    if isinstance(value, dict):
        return _filler(value, value.items(), dict, dict)
    if is_dataclass(value) and not isinstance(value, type):
        parts = ((field.name, getattr(value, field.name)) for field in fields(value) if field.init)
        return _filler({}, parts, dict, lambda changed: replace(value, **changed))
    return None


def _filler(
    whole: Any, parts: Iterable[tuple[Any, Any]], copy: Callable[[Any], Any], build: Callable[[Any], Any]
) -> Filler | None:
    """Fills those of `parts`, by place, that have arguments, in a copy of `whole`; `build` makes the value of it."""
    inside = [(place, found) for place, part in parts if (found := filler(part)) is not None]
    if not inside:
        return None

    def fill(values: Sequence[Number]) -> Any:
        made = copy(whole)
        for place, part in inside:
            made[place] = part(values)
        return build(made)

    return fill
