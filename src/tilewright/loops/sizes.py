"""Plain data of several sizes as one: numbers that differ between the sizes become arguments.

    rows (33,), stride 64   and   rows (70,), stride 64   →   rows (n0,), stride 64, where n0 is 33 or 70

Nests, layouts and steps of an executable are compared so. Where anything but a number differs, the sizes cannot
share a kernel or a program.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch

from tilewright.loops.nest import Buffer, Nest

Number = int | float


class NotAlike(Exception):
    """Two sizes of a program differ in more than numbers; the message says where."""


class Size(int):
    """An integer that differs between sizes: argument `number` of a kernel or a program. It counts as its value for
    one of the sizes, and prints as its name or, after arithmetic, its expression in C."""

    text: str
    number: int

    def __new__(cls, value: int, text: str, number: int = -1) -> Size:
        made = super().__new__(cls, value)
        made.text = text
        made.number = number
        return made

    def __repr__(self) -> str:
        return self.text

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return self.text

    def __mul__(self, other: int) -> Size:
        return Size(int(self) * int(other), f"({self} * {other})")

    def __rmul__(self, other: int) -> Size:
        return Size(int(other) * int(self), f"({other} * {self})")


class Factor(float):
    """The same for a number that is no integer, such as the reciprocal of a size."""

    text: str
    number: int

    def __new__(cls, value: float, text: str, number: int = -1) -> Factor:
        made = super().__new__(cls, value)
        made.text = text
        made.number = number
        return made

    def __repr__(self) -> str:
        return self.text

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return self.text


class Arguments:
    """The numbers that differ: one argument for each tuple of values by size."""

    def __init__(self) -> None:
        self.values: dict[tuple[Number, ...], int] = {}
        """By values: the argument's number."""

    def argument(self, values: tuple[Number, ...]) -> Number:
        # 0.0 equals -0.0, and no NaN equals another.
        if len(set(map(repr, values))) == 1:
            return values[0]
        number = self.values.setdefault(values, len(self.values))
        middle = values[len(values) // 2]
        if isinstance(middle, float):
            return Factor(middle, f"((const double*)sizes)[{number}]", number)
        return Size(middle, f"n{number}", number)


def in_64_bits(numbers: Sequence[Number]) -> list[int]:
    """Arguments of a kernel as it reads them: an integer, or the bits of a double."""
    kinds = "".join("d" if isinstance(number, float) else "q" for number in numbers)
    return list(struct.unpack(f"{len(kinds)}q", struct.pack(kinds, *numbers)))


def may_exceed(extent: int, most: int) -> bool:
    """Whether an extent is larger than `most` at one of the sizes."""
    return isinstance(extent, Size) or extent > most


def of_all_sizes(nests: Sequence[Nest]) -> tuple[Nest, list[tuple[Number, ...]]]:
    """The nests of one kernel at several sizes as one nest, and the values of its arguments. Raises NotAlike."""
    found = Arguments()
    bare = [replace(nest, inputs=_uncounted(nest.inputs), outputs=_uncounted(nest.outputs)) for nest in nests]
    nest: Nest = alike(bare, found.argument, f"the kernel {nests[0].name}")
    return replace(nest, arguments=len(found.values)), list(found.values)


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
    if isinstance(value, (Size, Factor)):
        return values[value.number]
    if isinstance(value, (tuple, list)):
        parts = [filled(part, values) for part in value]
        return value if all(new is old for new, old in zip(parts, value, strict=True)) else _rebuilt(value, parts)
    if isinstance(value, dict):
        return {key: filled(part, values) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        changed: dict[str, Any] = {}
        for field in fields(value):
            part = getattr(value, field.name)
            if field.init and (new := filled(part, values)) is not part:
                changed[field.name] = new
        return replace(value, **changed) if changed else value
    return value
