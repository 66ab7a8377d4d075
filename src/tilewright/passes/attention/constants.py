"""Computes, at compile time, the values in a graph that depend on no input.

    i = arange(S)[:, None];  j = arange(S)[None, :]
    m = (j <= i) & (j > i - 8)          →   bool [S, S], known

Works on Dynamo's torch-level graph and on graphs of ATen operators. An axis along which a value repeats has stride 0
here, so a mask that is expanded over batch and heads takes the memory of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
