"""Symbolic axes: what a tensor's dimensions are made of while operators are lowered to a loop nest.

A dimension is a *group* of axes, major to minor. `view` regroups axes, splitting one where it
must; `permute` reorders groups; a size-1 dimension is the empty group. When two values meet in an
operator their groups are unified: after that both run over the same axes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from math import prod


class Unfusable(Exception):
    """These operators cannot share one loop nest; the message says why."""


class AxisUsedTwice(Unfusable):
    """A value is used together with its transpose, so that one axis would index two dimensions."""


_SERIALS = count()


class Axis:
    """A range of integers. After unification it may stand for other axes: `leaves` tells which."""

    __slots__ = ("extent", "parts", "serial")

    def __init__(self, extent: int) -> None:
        self.extent = extent
        self.serial = next(_SERIALS)
        """Its place among all axes made: sets of axes have no order that two compilations share."""
        self.parts: tuple[Axis, ...] | None = None
        """None for a leaf; one axis it is the same as; or the axes, major to minor, it was split into."""

    def __repr__(self) -> str:
        return f"Axis({self.extent})"


Group = tuple[Axis, ...]


def group(size: int) -> Group:
    """A fresh dimension of `size` elements."""
    return () if size == 1 else (Axis(size),)


def leaves(axes: Iterable[Axis]) -> list[Axis]:
    """The leaf axes, major to minor, that `axes` stand for now."""
    found: list[Axis] = []
    for axis in axes:
        if axis.parts is None:
            found.append(axis)
        else:
            found.extend(leaves(axis.parts))
    return found


def refuse_diagonal(dims: Iterable[Group]) -> None:
    """Raise `AxisUsedTwice` where one axis runs along two of these dimensions: only a diagonal would be computed."""
    flat = leaves(axis for axes in dims for axis in axes)
    if len(set(flat)) != len(flat):
        raise AxisUsedTwice("a value is combined with its own transpose")


def size(axes: Iterable[Axis]) -> int:
    return prod(axis.extent for axis in axes)


def split(axis: Axis, minor: int) -> tuple[Axis, Axis]:
    """`axis` as two: `minor` is the extent of the second, and divides its own."""
    high, low = Axis(axis.extent // minor), Axis(minor)
    axis.parts = (high, low)
    return high, low


def strides_of(dims: Sequence[Sequence[Axis]], strides: Sequence[int]) -> dict[Axis, int]:
    """Per leaf axis the stride in elements of a tensor laid out with `strides` per dimension."""
    found: dict[Axis, int] = {}
    for axes, stride in zip(dims, strides, strict=True):
        for axis in reversed(leaves(axes)):
            found[axis] = found.get(axis, 0) + stride
            stride *= axis.extent
    return found


def unify(left: Group, right: Group) -> None:
    """Make two groups of equal size run over the same axes, splitting either where the other is finer."""
    a, b = leaves(left), leaves(right)
    while a and b:
        x, y = a.pop(), b.pop()
        if x is y:
            continue
        if x.extent == y.extent:
            x.parts = (y,)
        elif x.extent > y.extent and x.extent % y.extent == 0:
            high, low = split(x, y.extent)
            low.parts = (y,)
            a.append(high)
        elif y.extent > x.extent and y.extent % x.extent == 0:
            high, low = split(y, x.extent)
            low.parts = (x,)
            b.append(high)
        else:
            raise Unfusable(f"axes of {x.extent} and {y.extent} elements cannot be split into common parts")
        # A split or link may have changed axes still waiting in either list.
        a, b = leaves(a), leaves(b)
    if a or b:
        raise Unfusable("the operators divide their axes into groups of different sizes")


def regroup(groups: Iterable[Group], shape: Iterable[int]) -> tuple[Group, ...]:
    """The groups of the same elements viewed with `shape` (row-major order is kept)."""
    groups = tuple(groups)
    # If an axis occurred twice, its second occurrence would be split again.
    refuse_diagonal(groups)
    pending = leaves(axis for g in groups for axis in g)
    out: list[Group] = []
    for extent in reversed(tuple(shape)):
        wanted, taken = extent, list[Axis]()
        while wanted > 1:
            if not pending:
                raise Unfusable("a view has more elements than its tensor")
            axis = pending.pop()
            if wanted % axis.extent == 0:
                taken.insert(0, axis)
                wanted //= axis.extent
            elif axis.extent % wanted == 0:
                high, low = split(axis, wanted)
                pending.append(high)
                taken.insert(0, low)
                wanted = 1
            else:
                raise Unfusable(f"a view cuts an axis of {axis.extent} elements at {wanted}")
        out.append(tuple(taken))
    if pending:
        raise Unfusable("a view has fewer elements than its tensor")
    return tuple(reversed(out))
