"""How the axes of an operator's results follow from those of its operands: the rules that rows name.

An axis is a tuple of factors, major to minor, `()` where its size is 1: names of dimensions where a program is
captured (`graph/axis_names`), numbers where a trace is read. One rule does for both. It gets the call and returns
the axes of the result, or a list of them for several results, None for an absent one. A captured call knows the
sizes of its results, and whatever a rule says of them is checked; a recorded one does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, cast

Axis: TypeAlias = tuple[Any, ...]
Axes: TypeAlias = tuple[Axis, ...]
Result = Axes | list[Axes | None]
"""The axes of one result, or a list with those of each of several results."""


class UnknownShape(Exception):
    """The sizes of this result do not follow from the operands' alone."""


class Algebra(Protocol):
    """The arithmetic on axes that shape rules use."""

    def unknown(self, size: int, *, guess: bool = False) -> Axis:
        """An axis of `size` elements without a name yet; with `guess`, its size may name it at the end."""

    def unknown_shape(self, shape: Iterable[int], *, guess: bool = False) -> Axes: ...

    def number(self, size: int) -> Axis:
        """An axis whose size is that number and never gets a name."""

    def size_of(self, axis: Axis) -> int: ...

    def unify(self, left: Axis, right: Axis) -> Axis:
        """The one axis that two axes of equal size are, as in a broadcast or a contraction."""

    def regroup(self, axes: Axes, shape: Sequence[int]) -> Axes:
        """The axes of the same elements viewed with `shape`, in row-major order."""

    def part(self, axis: Axis, size: int) -> Axis:
        """`size` of the axis's elements, as a slice takes them."""

    def divided(self, axis: Axis, by: int) -> Axis:
        """A `by`-th of the axis."""

    def concatenated(self, axes: Sequence[Axis]) -> Axis: ...


@dataclass
class CallAxes:
    """One operator call: its arguments by name, and the axes of its operands."""

    names: Algebra
    arguments: Mapping[str, Any]
    axes_of: Callable[[Any], Axes | None]
    """Axes of a tensor argument; None of anything else."""
    operands: list[Axes]
    """Axes of every tensor operand, in order."""
    count: int | None
    """How many results there are; None where it is one that stands for itself."""
    known: Sequence[tuple[int, ...] | None] | None
    """The sizes of the results; None where they are not known, as in a trace."""
    dtype_of: Callable[[str], str]
    """The dtype of a tensor argument."""

    @property
    def shape(self) -> tuple[int, ...]:
        """NumberAxes of the first result; raises `UnknownShape`."""
        return self.shapes[0] or ()

    @property
    def shapes(self) -> Sequence[tuple[int, ...] | None]:
        if self.known is None:
            raise UnknownShape
        return self.known

    def axes(self, name: str) -> Axes | None:
        """Axes of the tensor argument `name`; None where it is absent."""
        return self.axes_of(self.arguments.get(name))

    def tensor(self, name: str) -> Axes:
        axes = self.axes(name)
        if axes is None:
            raise UnknownShape(f"no {name}")
        return axes

    def list_of(self, name: str) -> list[Axes]:
        argument = self.arguments[name]
        if not isinstance(argument, Sequence):
            raise UnknownShape(f"{name} is no list")
        return [axes for axes in map(self.axes_of, argument) if axes is not None]

    def dim(self, rank: int, name: str = "dim") -> int:
        """A dimension argument, counted from the front."""
        return cast("int", self.arguments[name]) % max(rank, 1)

    def dims(self, rank: int) -> list[int]:
        """The `dim` argument, one or several, counted from the front; empty where there is none."""
        argument = self.arguments.get("dim")
        listed = argument if isinstance(argument, Sequence) else [] if argument is None else [argument]
        return [dim % max(rank, 1) for dim in listed]

    def each(self, axes: Axes) -> Result:
        """The same axes for every result."""
        return axes if self.count is None else [axes] * self.count

    def wanted(self, *results: Axes | None) -> Result:
        """These results, without those that the argument `output_mask` does not ask for."""
        mask = self.arguments.get("output_mask")
        asked = mask if isinstance(mask, Sequence) else [True] * len(results)
        return [axes if want else None for axes, want in zip(results, asked, strict=False)]

    def broadcast(self, *operands: Axes) -> Axes:
        """The axes of operands that broadcast together, aligned at the right."""
        rank = max(map(len, operands), default=0)
        result: list[Axis] = [()] * rank
        for axes in operands:
            for place, axis in enumerate(axes, rank - len(axes)):
                size, given = self.names.size_of(result[place]), self.names.size_of(axis)
                if size == given:
                    result[place] = self.names.unify(result[place], axis)
                elif size == 1:
                    result[place] = axis
                elif given != 1:
                    raise UnknownShape(f"axes of {size} and {given} elements do not broadcast")
        return tuple(result)

    def kept(self, *operands: Axes, shape: Sequence[int] | None = None) -> Axes:
        """The axes of a result of `shape` in which each axis of an operand whose size stays keeps its name."""
        result: list[Axis] = []
        sizes = self.shape if shape is None else shape
        for place, size in enumerate(sizes):
            axis: Axis | None = None
            for axes in operands:
                behind = place - len(sizes) + len(axes)
                if behind >= 0 and self.names.size_of(axes[behind]) == size:
                    axis = axes[behind] if axis is None else self.names.unify(axis, axes[behind])
            result.append(self.names.unknown(size) if axis is None else axis)
        return tuple(result)


Rule = Callable[[CallAxes], Result]


def pointwise(call: CallAxes) -> Result:
    """The axes of the operands, broadcast; without operands those that the call's sizes give."""
    if not call.operands:
        return factory(call)
    if call.known is None:
        return call.each(call.broadcast(*call.operands))
    return call.each(call.kept(*call.operands))


def same(call: CallAxes) -> Result:
    """The axes of the first operand."""
    return call.each(call.operands[0])


def like(*names: str) -> Rule:
    """The axes of these arguments, one for each result."""

    def rule(call: CallAxes) -> Result:
        return call.tensor(names[0]) if len(names) == 1 else [call.axes(name) for name in names]

    return rule


def factory(call: CallAxes) -> Result:
    """NumberAxes that the call gives."""
    return call.names.unknown_shape(call.shape, guess=True)


def kept(call: CallAxes) -> Result:
    """An axis whose size stays keeps its name; axes are aligned at the right."""
    return call.each(call.kept(call.operands[0]))


def windows(call: CallAxes, source: Axes, kernel: Sequence[int]) -> list[int]:
    """How many windows of a convolution or pooling lie along the last axes of `source`, by the call's arguments."""
    stride, padding, dilation = (
        _along(call.arguments.get(name), len(kernel), otherwise)
        for name, otherwise in (("stride", kernel), ("padding", (0,)), ("dilation", (1,)))
    )
    counts = []
    for place, axis in enumerate(source[len(source) - len(kernel) :]):
        size, step, pad = call.names.size_of(axis), stride[place], padding[place]
        free = size + 2 * pad - dilation[place] * (kernel[place] - 1) - 1
        count = free // step + 1
        if call.arguments.get("ceil_mode") is True and free % step and count * step < size + pad:
            count += 1
        counts.append(count)
    return counts


def _along(argument: Any, rank: int, otherwise: Sequence[int]) -> Sequence[int]:
    """An argument that is one number, one for each axis, or absent."""
    listed = [argument] if isinstance(argument, int) else argument or otherwise
    return listed if len(listed) == rank else [listed[0]] * rank


def pooled(call: CallAxes) -> Result:
    """An axis whose size stays keeps its name; of a recorded call the windows along the last axes follow: two or three,
    as the kernel has, which profilers record expanded."""
    source = call.operands[0]
    if call.known is not None:
        return kept(call)
    kernel = call.arguments.get("output_size") or call.arguments["kernel_size"]
    along = _along(kernel, 3 if isinstance(kernel, (list, tuple)) and len(kernel) == 3 else 2, ())
    counts = along if "output_size" in call.arguments else windows(call, source, along)
    return call.each(source[: -len(along)] + call.names.unknown_shape(counts))


def reduction(call: CallAxes) -> Result:
    """Without the axes `dim`, or all of them; with `keepdim` they stay with size 1."""
    source = call.operands[0]
    reduced = call.dims(len(source)) or range(len(source))
    if call.arguments.get("keepdim") is True:
        return call.each(tuple(() if i in reduced else axis for i, axis in enumerate(source)))
    return call.each(tuple(axis for i, axis in enumerate(source) if i not in reduced))


def no_result(_: CallAxes) -> Result:
    return []


class NumberAxes:
    """Axes of numbers: those of a recorded call."""

    def unknown(self, size: int, *, guess: bool = False) -> Axis:
        return () if size == 1 else (size,)

    def number(self, size: int) -> Axis:
        return self.unknown(size)

    def unknown_shape(self, shape: Iterable[int], *, guess: bool = False) -> Axes:
        return tuple(map(self.unknown, shape))

    def size_of(self, axis: Axis) -> int:
        size = 1
        for factor in axis:
            size *= factor
        return size

    def unify(self, left: Axis, right: Axis) -> Axis:
        if self.size_of(left) != self.size_of(right):
            raise UnknownShape(f"axes of {self.size_of(left)} and {self.size_of(right)} elements meet")
        return left

    def regroup(self, axes: Axes, shape: Sequence[int]) -> Axes:
        return self.unknown_shape(shape)

    def part(self, axis: Axis, size: int) -> Axis:
        return self.unknown(size)

    def divided(self, axis: Axis, by: int) -> Axis:
        return self.unknown(self.size_of(axis) // by)

    def concatenated(self, axes: Sequence[Axis]) -> Axis:
        return self.unknown(sum(map(self.size_of, axes)))
