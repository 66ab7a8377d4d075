"""Integers that count up by one along an axis, or are one number everywhere, for lengths that may be symbols.

    i = arange(S)[None, None, :, None] + 2          →   counts up from 2 along axis -2
    i[:, :, :1]                                     →   2
    diff(i, prepend=i[..., :1] - 1) != 1            →   False

S may be a symbol: nothing but the structure of the graph is looked at where a value cannot be computed.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from tilewright.passes.attention.constants import SAME, Constants, once
from tilewright.passes.attention.spelling import argument, example, spelled

INTEGERS = (torch.int64, torch.int32, torch.bool)
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "le": operator.le, "lt": operator.lt, "ge": operator.ge, "gt": operator.gt, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
REARRANGING = frozenset({"unsqueeze", "getitem", "transpose", "permute"})
"""Views whose other arguments are no sizes."""


class Count(NamedTuple):
    """`first + i` with i the index along an axis counted from the last, -1; or `first` everywhere."""

    axis: int | None
    first: int


def count_of(node: object, constants: Constants) -> Count | None:
    """What a node, or a plain number, counts; None where that is not seen."""
    if isinstance(node, int):
        return Count(None, int(node))
    fake = example(node)
    if not isinstance(node, Node) or fake is None or fake.dtype not in INTEGERS:
        return None
    value = constants.value(node)
    return _of_value(value) if value is not None else _of_call(node, constants)


def _of_value(value: torch.Tensor) -> Count | None:
    value = once(value)
    numbers = value.flatten().to(torch.int64)
    if len(numbers) == 1:
        return Count(None, int(numbers[0]))
    for axis in range(-1, -value.dim() - 1, -1):
        if len(numbers) == value.shape[axis] > 1:
            first = int(numbers[0])
            return Count(axis, first) if torch.equal(numbers, torch.arange(first, first + len(numbers))) else None
    return None


def _of_call(node: Node, constants: Constants) -> Count | None:
    name, operands = spelled(node), [count_of(x, constants) for x in node.args[:2]]
    first, second = (*operands, None, None)[:2]
    if name == "arange":
        return _of_arange(node)
    if first is None:
        return None
    if name in SAME or name in ("cast", "expand", "broadcast_to"):
        return first
    if name in ("add", "sub") and second is not None and not node.kwargs:
        return _sum(first, second, -1 if name == "sub" else 1)
    if name in COMPARISONS and second is not None:
        return _compared(name, first, second)
    if name in REARRANGING:
        return _rearranged(node, first)
    if name == "cumsum":
        return first if first == Count(None, 0) else None
    return _difference(node, first, constants) if name == "diff" else None


def _of_arange(node: Node) -> Count | None:
    start, step = (node.args[0] if len(node.args) > 1 else 0), (node.args[2] if len(node.args) > 2 else 1)
    plain = step == 1 and not {"start", "step"} & node.kwargs.keys()
    return Count(-1, start) if plain and isinstance(start, int) else None


def _sum(first: Count, second: Count, sign: int) -> Count | None:
    if second.axis is None:
        return Count(first.axis, first.first + sign * second.first)
    return Count(second.axis, first.first + second.first) if first.axis is None and sign == 1 else None


def _compared(name: str, first: Count, second: Count) -> Count | None:
    """What holds everywhere: of numbers, or of a count against one that its first place settles."""
    if second.axis is not None or (first.axis is not None and name not in ("ge", "gt")):
        return None
    holds = COMPARISONS[name](first.first, second.first)
    return Count(None, int(holds)) if first.axis is None or holds else None


def _rearranged(node: Node, count: Count) -> Count | None:
    """The count seen through a view, tried on two places along each axis."""
    fake = example(node.args[0])
    assert fake is not None
    if count.axis is None:
        return count
    if len(node.all_input_nodes) > 1 or node.kwargs or (spelled(node) == "getitem" and not _from_start(node.args[1])):
        return None
    shape = [1] * fake.dim()
    shape[count.axis] = 2
    places = torch.arange(count.first, count.first + 2).reshape(shape).expand([2] * fake.dim())
    other: tuple[Any, ...] = node.args[1:]
    function: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    try:
        return _of_value(function(places, *other))
    except (RuntimeError, IndexError):
        return None


def _from_start(index: object) -> bool:
    """Whether an index takes whole axes or their first place, which two places along an axis show."""
    parts = index if isinstance(index, tuple) else (index,)
    wholes = (slice(None), slice(None, 1), slice(0, 1))
    return all(part is None or part is Ellipsis or part in wholes for part in parts)


def _difference(node: Node, count: Count, constants: Constants) -> Count | None:
    """`diff` along the axis that is counted, with the place before the first in front."""
    before = count_of(node.kwargs.get("prepend"), constants)
    along = argument(node, 2, "dim", -1) == count.axis == -1 and argument(node, 1, "n", 1) == 1
    fits = along and before == Count(None, count.first - 1) and "append" not in node.kwargs
    return Count(None, 1) if fits else None
