"""Recognises integer tensors that count up by one along an axis (an iota) or hold one number, also of symbolic length.

    i = arange(S)[None, None, :, None] + 2          →   counts up from 2 along axis -2
    i[:, :, :1]                                     →   2
    diff(i, prepend=i[..., :1] - 1) != 1            →   False

If a value cannot be computed (S is a symbol), only the structure of the graph is read.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.fx import Node

from tilewright.graph.canonical import argument, canonical_name, example
from tilewright.passes.attention.constants import SAME, Constants, without_repeats

INTEGERS = (torch.int64, torch.int32, torch.bool)
COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "le": operator.le, "lt": operator.lt, "ge": operator.ge, "gt": operator.gt, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
MIRRORED = {"le": "ge", "ge": "le", "lt": "gt", "gt": "lt"}
REARRANGING = frozenset({"unsqueeze", "getitem", "transpose", "permute"})
"""Views without sizes among their arguments."""


class Iota(NamedTuple):
    """`first + i`, where i is the index along `axis` (negative: from the last); `first` everywhere without an axis."""

    axis: int | None
    first: int


def iota_of(node: object, constants: Constants) -> Iota | None:
    """The iota that a node or a plain number is; None if it is not recognised as one."""
    if isinstance(node, int):
        return Iota(None, int(node))
    fake = example(node)
    if not isinstance(node, Node) or fake is None or fake.dtype not in INTEGERS:
        return None
    value = constants.value(node)
    return _of_value(value) if value is not None else _of_call(node, constants)


def _of_value(value: torch.Tensor) -> Iota | None:
    value = without_repeats(value)
    numbers = value.flatten().to(torch.int64)
    if len(numbers) == 1:
        return Iota(None, int(numbers[0]))
    for axis in range(-1, -value.dim() - 1, -1):
        if len(numbers) == value.shape[axis] > 1:
            first = int(numbers[0])
            return Iota(axis, first) if torch.equal(numbers, torch.arange(first, first + len(numbers))) else None
    return None


def _of_call(node: Node, constants: Constants) -> Iota | None:
    name, operands = canonical_name(node), [iota_of(x, constants) for x in node.args[:2]]
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
        return first if first == Iota(None, 0) else None
    return _difference(node, first, constants) if name == "diff" else None


def compared_keys(node: Node, name: str, constants: Constants) -> tuple[int, Node, str] | None:
    """n, x and op of `n + j op x` for key j, where `node` compares by `name` in either order; None for other calls."""
    operands = [x for x in node.args if isinstance(x, Node)]
    if name not in MIRRORED or len(operands) != 2:
        return None
    one, other = operands
    for keys, x, op in ((one, other, name), (other, one, MIRRORED[name])):
        count = iota_of(keys, constants)
        if count is not None and count.axis == -1:
            return count.first, x, op
    return None


def _of_arange(node: Node) -> Iota | None:
    start, step = (node.args[0] if len(node.args) > 1 else 0), (node.args[2] if len(node.args) > 2 else 1)
    plain = step == 1 and not {"start", "step"} & node.kwargs.keys()
    return Iota(-1, start) if plain and isinstance(start, int) else None


def _sum(first: Iota, second: Iota, sign: int) -> Iota | None:
    if second.axis is None:
        return Iota(first.axis, first.first + sign * second.first)
    return Iota(second.axis, first.first + second.first) if first.axis is None and sign == 1 else None


def _compared(name: str, first: Iota, second: Iota) -> Iota | None:
    """A comparison with one result everywhere: of two numbers, or of an iota whose first value decides."""
    if second.axis is not None or (first.axis is not None and name not in ("ge", "gt")):
        return None
    holds = COMPARISONS[name](first.first, second.first)
    return Iota(None, int(holds)) if first.axis is None or holds else None


def _rearranged(node: Node, count: Iota) -> Iota | None:
    """The iota after a view, found by applying the view to a tensor of two elements along each axis."""
    fake = example(node.args[0])
    assert fake is not None
    if count.axis is None:
        return count
    if (
        len(node.all_input_nodes) > 1
        or node.kwargs
        or (canonical_name(node) == "getitem" and not _from_start(node.args[1]))
    ):
        return None
    shape = [1] * fake.dim()
    shape[count.axis] = 2
    sample = torch.arange(count.first, count.first + 2).reshape(shape).expand([2] * fake.dim())
    other: tuple[Any, ...] = node.args[1:]
    function: Any = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
    try:
        return _of_value(function(sample, *other))
    except (RuntimeError, IndexError):
        return None


def _from_start(index: object) -> bool:
    """Whether an index takes whole axes or their first elements, which a sample of two elements shows."""
    parts = index if isinstance(index, tuple) else (index,)
    wholes = (slice(None), slice(None, 1), slice(0, 1))
    return all(part is None or part is Ellipsis or part in wholes for part in parts)


def _difference(node: Node, count: Iota, constants: Constants) -> Iota | None:
    """`diff` along the iota's axis, with the value before its first one prepended."""
    before = iota_of(node.kwargs.get("prepend"), constants)
    along = argument(node, 2, "dim", -1) == count.axis == -1 and argument(node, 1, "n", 1) == 1
    fits = along and before == Iota(None, count.first - 1) and "append" not in node.kwargs
    return Iota(None, 1) if fits else None
