"""Memory layouts, and moves: operators that only rearrange a value (views, slices, copies and lossless casts)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from tilewright.graph import calls
from tilewright.graph.insert import REFUSED_VIEW, insert_again

if TYPE_CHECKING:
    from torch.fx import Node

MOVES = {
    "clone", "view", "_unsafe_view", "reshape", "slice", "select", "squeeze", "unsqueeze", "expand", "t", "transpose",
    "permute", "slice_backward", "select_backward",
}  # fmt: skip
"""Operators that rearrange the elements of their first operand, or pad them with zeros."""


def layout(node: Node) -> object:
    """Dtype, device, sizes and strides of a tensor, and whether it is read conjugated or negated; symbolic ones as
    expressions, since comparing symbols would bind them. Of another value the node itself, which is equal to no other.
    """
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return node
    extents = (*value.shape, *value.stride())
    read = value.is_conj(), value.is_neg()
    return value.dtype, value.device, read, *(n.node.expr if isinstance(n, torch.SymInt) else n for n in extents)


def before_widening(node: Node) -> Node:
    """`node` without the widening cast below it: its moves are applied to the operand of the cast; else `node`.

    view(_to_copy(x, float32))  →  view(x)
    """
    moves, cast = _below_moves(node)
    source = widened(cast)
    if source is None or not _can_apply(moves, source):
        return node
    for move in reversed(moves):
        source = insert_again(move, move, source)
    return source


def widening_below(node: Node) -> Node | None:
    """The widening cast that `node` is, or whose result it rearranges as its operand can be rearranged, too."""
    moves, cast = _below_moves(node)
    source = widened(cast)
    return None if source is None or not _can_apply(moves, source) else cast


def _can_apply(moves: list[Node], source: Node) -> bool:
    """Whether the moves, last first, can be applied to `source`: a view may not where there are gaps between rows."""
    from torch import fx

    value: Any = calls.output(source)
    for move in reversed(moves):
        target: Any = move.target
        args, kwargs = fx.map_arg((move.args[1:], move.kwargs), lambda operand: operand.meta["val"])
        try:
            with value.fake_mode, torch.no_grad():
                value = target(value, *args, **kwargs)
        except REFUSED_VIEW:
            return False
    return True


def _below_moves(node: Node) -> tuple[list[Node], Node]:
    """The chain of moves that ends in `node`, last first, and their source."""
    moves: list[Node] = []
    while node.op == "call_function" and calls.operator_name(node.target) in MOVES:
        moves.append(node)
        node = node.all_input_nodes[0]
    return moves, node


def readers_through_moves(node: Node) -> Iterator[Node]:
    """The nodes that read `node` directly or through moves."""
    for user in node.users:
        if user.op == "call_function" and calls.operator_name(user.target) in MOVES:
            yield from readers_through_moves(user)
        else:
            yield user


def widened(node: Node) -> Node | None:
    """The operand of a lossless cast that changes only the dtype, and closes gaps; None for any other call."""
    if calls.operator_name(node.target) != "_to_copy":
        return None
    source = node.all_input_nodes[0]
    before, after = calls.output(source), calls.output(node)
    if before is None or after is None or before.device != after.device or _order(before) != _order(after):
        return None
    return source if _represents_all(after.dtype, before.dtype) else None


def _order(tensor: torch.Tensor) -> list[int]:
    """The axes of more than one element, by falling stride."""
    shape = calls.shape_of(tensor)
    return [axis for axis in memory_order(calls.strides_of(tensor)) if shape[axis] > 1]


def memory_order(strides: Sequence[int]) -> list[int]:
    """The axes from the outermost in memory to the innermost."""
    return sorted(range(len(strides)), key=lambda axis: -strides[axis])


def laid_by(x: Tensor, order: list[int]) -> Tensor:
    """`x` with its axes in this order in memory and without gaps: a copy, if it lies otherwise."""
    dense: Tensor = x.permute(order).contiguous()
    return dense.permute([order.index(axis) for axis in range(x.dim())])


def _represents_all(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of `narrow` is one of `wide`."""
    if narrow == wide or not (narrow.is_floating_point and wide.is_floating_point):
        return False
    more, less = torch.finfo(wide), torch.finfo(narrow)
    return more.eps <= less.eps and more.max >= less.max and more.smallest_normal <= less.smallest_normal


FORMATS = {4: torch.channels_last, 5: torch.channels_last_3d}
"""PyTorch's memory format by the number of dimensions. It has none for sequences [N, C, L]."""


def lies_channels_last(x: Tensor) -> bool:
    """Whether the channels of `x` [N, C, …] (sequences, images or volumes) are contiguous, without gaps."""
    if x.dim() == 3:
        return x.transpose(1, 2).is_contiguous()
    return x.dim() in FORMATS and x.is_contiguous(memory_format=FORMATS[x.dim()])


def laid_channels_last(x: Tensor) -> Tensor:
    """A channels-last copy, with the strides that `clone` gives it."""
    if x.dim() == 3:
        return x.unsqueeze(2).clone(memory_format=torch.channels_last).squeeze(2)
    return x.clone(memory_format=FORMATS[x.dim()])
