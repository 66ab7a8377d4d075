"""What the masks of one attention amount to: nothing, exactly causal, or a mask that must be passed on.

A mask built in the graph from constants (`torch.ones(N, N).tril()`, comparisons of `arange`) is
computed here and looked at. A mask that is an input or a buffer is not: it may change.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from tilewright.passes.attention.match import NEGLIGIBLE, Added, Attention, Filled
from tilewright.passes.attention.spelling import (
    Refusal,
    argument,
    example,
    mutates,
    spelled,
    static,
    tensor_of,
)

MOST_ELEMENTS = 2**24
"""Larger constants are not computed at compile time; such masks are passed on."""
STEADY = 32.0
"""Masks whose row maxima stay within this do not cost the log-sum-exp its last bits."""
SHAPED = frozenset({"ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"})
"""Constants that read no more of their argument than its shape and dtype."""
CONSTANT = SHAPED | {
    "ones", "zeros", "full", "arange", "eye", "tensor", "scalar_tensor", "tril", "triu", "sqrt",
    "rsqrt", "pow", "add", "sub", "rsub", "mul", "div", "neg", "abs", "eq", "ne", "lt", "le", "gt",
    "ge", "and_", "or_", "not_", "bitwise_not", "bitwise_and", "bitwise_or", "logical_and",
    "logical_or", "where", "masked_fill", "cast", "bool", "int", "long", "view", "unsqueeze",
    "squeeze", "expand", "transpose", "permute", "t", "getitem", "getattr", "contiguous",
    "broadcast_to", "minimum", "maximum",
}  # fmt: skip


class Constants:
    """The values of the nodes of one graph that depend on no input."""

    def __init__(self, graph: Graph) -> None:
        self._known: dict[Node, torch.Tensor | None] = {}
        # A constant that is written to is none; its views are too many to follow.
        self._written = any(
            self.value(target) is not None
            for node in graph.nodes
            if mutates(node) and isinstance(target := argument(node, 0, "input"), Node)
        )
        if self._written:
            self._known.clear()

    def value(self, node: Node) -> torch.Tensor | None:
        """The constant on the CPU; None for anything that is no constant, or too large to compute here."""
        if node not in self._known:
            self._known[node] = None
            self._known[node] = self._compute(node)
        return self._known[node]

    def scalar(self, x: object) -> float | None:
        """The number that an argument of a call holds, if it is known."""
        if isinstance(x, (int, float)):
            return float(x)
        value = self.value(x) if isinstance(x, Node) else None
        return float(value) if value is not None and value.dim() == 0 and not value.is_complex() else None

    def _compute(self, node: Node) -> torch.Tensor | None:
        name, fake = spelled(node), example(node)
        known = fake is not None and static(fake.shape) and fake.numel() <= MOST_ELEMENTS
        if getattr(self, "_written", False) or name not in CONSTANT or not known:
            return None
        assert fake is not None
        if name in SHAPED:
            position = 2 if name == "new_full" else 1
            number = self.scalar(argument(node, position, "fill_value") if "full" in name else "ones" in name)
            return None if number is None else torch.full(tuple(fake.shape), number, dtype=fake.dtype)
        values = {x: self.value(x) for x in node.all_input_nodes}
        if any(value is None for value in values.values()):
            return None
        args = map_arg(node.args, lambda x: values[x])
        kwargs = {key: map_arg(x, lambda x: values[x]) for key, x in node.kwargs.items() if key != "device"}
        return _run(node, _on_cpu(args), kwargs)


def _on_cpu(args: Any) -> list[Any]:
    cpu = torch.device("cpu")
    return [cpu if isinstance(x, torch.device) or (isinstance(x, str) and "cuda" in x) else x for x in args]


def _run(node: Node, args: list[Any], kwargs: dict[str, Any]) -> torch.Tensor | None:
    with torch.no_grad(), torch.device("cpu"):
        if isinstance(node.target, str):
            value = getattr(args[0], node.target)(*args[1:], **kwargs)
        else:
            assert callable(node.target)
            value = node.target(*args, **kwargs)
    return value if isinstance(value, torch.Tensor) else None


@dataclass(frozen=True)
class Masking:
    """How the fused form masks: `is_causal`, or the tensors it passes on, or neither."""

    causal: bool = False
    leaks: bool = False
    """Causal by addition: NaN + -inf is NaN, so in eager a NaN key reaches rows that do not see it."""
    added: tuple[Added, ...] = ()
    filled: tuple[Filled, ...] = ()
    steady: bool = True
    """Whether what is added is known to leave every row a key, and that one near 0."""
    some_row_dropped: bool = False
    """Whether `filled` may leave a row without any key."""

    @property
    def fill(self) -> float:
        return self.filled[0].value


def settle_masks(attention: Attention, constants: Constants) -> Masking:
    """The masks of an attention as one of the forms that fused attention knows."""
    if not attention.added and not attention.filled:
        return Masking()
    steady, combined = not attention.added, _combined(attention, constants)
    if combined is not None:
        added, dropped = combined
        rows, columns = dropped.shape
        if not added[~dropped].any():
            if not dropped.any():
                return Masking()
            if rows == columns and torch.equal(dropped, torch.ones_like(dropped).triu(1)):
                return Masking(causal=True, leaks=bool(attention.added))
        steady = steady or bool((added.masked_fill(dropped, -math.inf).amax(-1).abs() <= STEADY).all())
    fills = {filled.value for filled in attention.filled}
    if len(fills) > 1 or (fills and attention.added and fills != {-math.inf}):
        raise Refusal("masks that drop keys in different ways: a row without any key left has no fused form")
    return Masking(
        added=tuple(attention.added),
        filled=tuple(attention.filled),
        steady=steady,
        some_row_dropped=_may_drop_a_row(attention.filled, constants),
    )


def _dropped(filled: Filled, constants: Constants) -> torch.Tensor | None:
    value = constants.value(filled.mask)
    return value if value is None or not filled.inverted else ~value


def _may_drop_a_row(fills: list[Filled], constants: Constants) -> bool:
    masks = [_dropped(filled, constants) for filled in fills]
    known = [mask for mask in masks if mask is not None]
    if len(known) != len(masks):
        return bool(masks)
    dropped = known[0] if known else torch.zeros(1, dtype=torch.bool)
    for mask in known[1:]:
        dropped = dropped | mask
    return bool(dropped.all(-1).any())


def _combined(attention: Attention, constants: Constants) -> tuple[torch.Tensor, torch.Tensor] | None:
    """All masks as (added [Nq, Nk], dropped [Nq, Nk]), if all are constant and alike for every head."""
    shape = tensor_of(attention.scores).shape[-2:]
    if not static(shape) or shape.numel() > MOST_ELEMENTS:
        return None
    added, dropped = torch.zeros(shape), torch.zeros(shape, dtype=torch.bool)
    for term in attention.added:
        value = constants.value(term.mask)
        if value is None or not _is_one_matrix(value):
            return None
        value = value.reshape(value.shape[-2:]).float() * term.times
        added = added + value
        dropped = dropped | (value <= NEGLIGIBLE)
    for filled in attention.filled:
        mask = _dropped(filled, constants)
        if mask is None or not _is_one_matrix(mask):
            return None
        dropped = dropped | mask.reshape(mask.shape[-2:])
    return added, dropped


def _is_one_matrix(value: torch.Tensor) -> bool:
    return all(size == 1 for size in value.shape[:-2])
