"""The values in a graph that depend on no input: computed, or, where a size is a symbol, known to count up or be alike.

    i = arange(S)[:, None];  j = arange(S)[None, :]
    m = (j <= i) & (j > i - 8)                      →   bool [S, S], known (`Constants`)

    i = arange(S)[None, None, :, None] + 2          →   counts up from 2 along axis -2 (`Iota`)
    i[:, :, :1]                                     →   2
    diff(i, prepend=i[..., :1] - 1) != 1            →   False

Works on Dynamo's torch-level graph and on graphs of ATen operators. An axis along which a value repeats has stride 0
here, so a mask that is expanded over batch and heads takes the memory of one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tilewright.graph.canonical import argument, canonical_name, example, memory_of, mutates, static, written_by
from tilewright.pytorch.state import in_real_tensors

MOST_BYTES = 2**27
"""Larger constants are not computed at compile time: a bool mask of 11585 by 11585 is."""
MOST_COMPARED = 2**20
"""Elements up to which a value is searched for axes along which it repeats."""
UNIFORM = frozenset(
    {"ones", "zeros", "full", "ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"}
)
"""Constants of one number, which read no more of an argument than its shape and dtype."""
ELEMENTWISE = frozenset({
    "sqrt", "rsqrt", "pow", "add", "sub", "rsub", "mul", "div", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge",
    "and_", "or_", "not_", "bitwise_not", "bitwise_and", "bitwise_or", "logical_and", "logical_or", "where",
    "masked_fill", "cast", "bool", "int", "long", "minimum", "maximum",
})  # fmt: skip
SAME = frozenset({"contiguous", "detach", "alias", "lift_fresh_copy"})
"""Calls that give the values of their argument."""
REPEATING = frozenset({"unsqueeze", "squeeze", "expand", "transpose", "permute", "t", "broadcast_to", "getattr"})
"""Views of any tensor, one that repeats along an axis included."""
CONSTANT = UNIFORM | ELEMENTWISE | SAME | REPEATING | {
    "arange", "eye", "tensor", "scalar_tensor", "tril", "triu", "view", "getitem", "slice",
    "select", "narrow", "index", "repeat", "diff", "cumsum", "cat",
}  # fmt: skip


class Constants:
    """The values of the nodes of one graph that depend on no input but those `given`."""

    def __init__(self, graph: Graph, given: Mapping[Node, torch.Tensor] | None = None) -> None:
        self._known: dict[Node, torch.Tensor | None] = dict(given or {})
        self._written = {memory for node in graph.nodes if mutates(node) and (memory := memory_of(written_by(node)))}
        """The storages that some call writes to; values in them are not constant."""

    def value(self, node: Node) -> torch.Tensor | None:
        """The constant on the CPU; None if the value is not constant, or is too large to compute here."""
        if node not in self._known:
            self._known[node] = None
            with in_real_tensors():
                self._known[node] = self._compute(node)
        return self._known[node]

    def scalar(self, x: object) -> float | None:
        """The number that an argument of a call holds, if it is known."""
        if isinstance(x, (int, float)):
            return float(x)
        value = self.value(x) if isinstance(x, Node) else None
        return float(value) if value is not None and value.dim() == 0 and not value.is_complex() else None

    def _compute(self, node: Node) -> torch.Tensor | None:
        name, fake = canonical_name(node), example(node)
        if name not in CONSTANT or fake is None or not static(fake.shape) or memory_of(node) in self._written:
            return None
        if name in UNIFORM:
            position = 2 if name == "new_full" else 1
            number = self.scalar(argument(node, position, "fill_value") if "full" in name else "ones" in name)
            return None if number is None else torch.tensor(number, dtype=fake.dtype).expand(fake.shape)
        values = {x: self.value(x) for x in node.all_input_nodes}
        known = {x: value for x, value in values.items() if value is not None}
        if len(known) < len(values):
            return None
        if name in SAME:
            return next(iter(known.values()), None)
        if name in ELEMENTWISE:
            known = {x: without_repeats(value) for x, value in known.items()}
            shape = torch.broadcast_shapes(*(value.shape for value in known.values()))
            if shape.numel() * max(fake.itemsize, *(x.itemsize for x in known.values()), 1) > MOST_BYTES:
                return None
        elif name not in REPEATING and fake.numel() * fake.itemsize > MOST_BYTES:
            return None
        result = computed(node, known)
        return None if result is None else _repeating(result.expand(fake.shape))


def without_repeats(value: torch.Tensor) -> torch.Tensor:
    """`value` with one element along each axis that it repeats along."""
    for axis, (size, stride) in enumerate(zip(value.shape, value.stride(), strict=True)):
        if size > 1 and stride == 0:
            value = value.narrow(axis, 0, 1)
    return value


def _repeating(value: torch.Tensor) -> torch.Tensor:
    """`value` with stride 0 along each axis that it repeats along, where it is small enough to look."""
    small, shape = without_repeats(value), value.shape
    if small.numel() > MOST_COMPARED:
        return value
    for axis, size in enumerate(small.shape):
        first = small.narrow(axis, 0, min(size, 1))
        if size > 1 and torch.equal(small, first.expand_as(small)):
            small = first
    return small.expand(shape)


def computed(node: Node, values: dict[Node, torch.Tensor]) -> torch.Tensor | None:
    """The result of the call on the CPU; None if it is no tensor, or if the call cannot view repeated values."""
    cpu = torch.device("cpu")
    given: tuple[Any, ...] = map_arg(node.args, values.__getitem__)
    args: list[Any] = [cpu if isinstance(x, torch.device) or (isinstance(x, str) and "cuda" in x) else x for x in given]
    kwargs: dict[str, Any] = {k: map_arg(x, values.__getitem__) for k, x in node.kwargs.items() if k != "device"}
    with torch.no_grad(), cpu:
        if canonical_name(node) == "view":
            args[0] = args[0].contiguous()
        if isinstance(node.target, str):
            value = getattr(args[0], node.target)(*args[1:], **kwargs)
        else:
            assert callable(node.target)
            value = node.target(*args, **kwargs)
    return value if isinstance(value, torch.Tensor) else None


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
