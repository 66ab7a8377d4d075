"""Masks that show the first keys of a cache, how many being in a tensor, and caches that were repeated for each head.

m = (arange(S) <= position)[None, None]                →   the keys below position + 1
k = cache.repeat_interleave(4, 1)                      →   cache, each of whose heads four heads of the queries share
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.fx import Node

from tilewright.graph.calls import shape_of
from tilewright.graph.canonical import argument, canonical_name, example, same_shape, static, tensor_of
from tilewright.graph.constants import SAME, Constants, compared_keys
from tilewright.graph.insert import insert_call
from tilewright.passes.attention.library import FILLS
from tilewright.passes.attention.mask_parts import MaskParts
from tilewright.pytorch.state import in_real_tensors

aten: Any = torch.ops.aten
INTEGERS = (torch.int64, torch.int32)


class Prefix(NamedTuple):
    """A query sees the keys below `last + more`."""

    last: Node
    """Integers, aligned with the comparison at the right."""
    more: int
    rank: int
    """Axes of the comparison."""
    inserted: tuple[int, ...]
    """Axes of size 1 that were inserted since, one after the other."""
    else_all: bool
    """Whether a query that sees no key sees all of them."""

    def write(self, before: Node, batch: int, queries: int) -> Node:
        """`last` as [batch, 1, queries, 1], written before `before`."""
        node = self.last
        for axis in (*[0] * (self.rank - _rank(node)), *self.inserted):
            node = insert_call(before, aten.unsqueeze.default, node, axis)
        return insert_call(before, aten.expand.default, node, [batch, 1, queries, 1])


def prefix_of(mask: MaskParts, constants: Constants, keys: int | torch.SymInt) -> Prefix | None:
    """The prefix of `keys` that a mask [B, H, Sq, Sk] lets queries see; None if heads differ or it is no prefix."""
    if len(mask.conditions) != 1 or mask.biases or not mask.shows_all or not mask.fill_values <= FILLS.keys():
        return None
    inserted: list[int] = []
    (node,) = mask.conditions
    if tensor_of(node).shape[-1] != keys:
        return None
    while True:
        name, source = canonical_name(node), argument(node, 0, "input")
        if name == "unsqueeze" and isinstance(source, Node) and isinstance(axis := argument(node, 1, "dim"), int):
            inserted.insert(0, axis % (_rank(source) + 1))
        elif not isinstance(source, Node) or not (name in (*SAME, "expand", "broadcast_to") or _from_first(node)):
            break
        elif _rank(source) != _rank(node):
            inserted[:0] = [0] * (_rank(node) - _rank(source))
        node = source
    found = _compared(node, constants)
    if found is None:
        return None
    last, more = found
    sizes = [1] * (_rank(node) - _rank(last)) + list(shape_of(tensor_of(last)))
    for axis in inserted:
        sizes.insert(axis, 1)
    sizes = [1] * (4 - len(sizes)) + sizes
    fits = len(sizes) == 4 and sizes[1] == sizes[3] == 1
    shows_all = any(FILLS[fill] for fill in mask.fill_values)
    return Prefix(last, more, _rank(node), tuple(inserted), shows_all) if fits else None


def _from_first(node: Node) -> bool:
    """Whether a call cuts off the last keys, if anything."""
    if canonical_name(node) != "slice" or argument(node, 4, "step", 1) != 1 or argument(node, 2, "start"):
        return False
    return shape_of(tensor_of(node.args[0]))[:-1] == shape_of(tensor_of(node))[:-1]


@in_real_tensors()
def _compared(node: Node, constants: Constants) -> tuple[Node, int] | None:
    """x and m of `key < x + m`, where keys count up along the last axis and x is an integer tensor."""
    found = compared_keys(node, str(canonical_name(node)), constants)
    if found is None:
        return None
    first_key, last, name = found
    value = example(last)
    is_bound = name in ("le", "lt") and value is not None and value.dtype in INTEGERS
    return (last, (name == "le") - first_key) if is_bound else None


def unrepeated(node: Node) -> Node:
    """x [B, H, S, D] of a tensor that has each of its heads several times in a row; else the node itself.

    Such as `x[:, :, None].expand(B, H, n, S, D).reshape(B, H n, S, D)`, `repeat_interleave(x, n, 1)` or, of one head,
    `x.expand(B, n, S, D)`, in either kind of graph.
    """
    whole, source = example(node), argument(node, 0, "input")
    if whole is None or whole.dim() != 4 or not isinstance(source, Node):
        return node
    if canonical_name(node) == "repeat_interleave" and argument(node, 2, "dim") in (1, -3):
        return source if isinstance(argument(node, 1, "repeats"), int) else node
    if canonical_name(node) == "expand":
        one = example(source)
        if one is None or one.dim() != 4 or one.shape[1] != 1 or not static(whole.shape[1:2]):
            return node
        return source if same_shape(whole.shape[:1], one.shape[:1]) else node
    while canonical_name(source) == "contiguous" and isinstance(source.args[0], Node):
        source = source.args[0]
    new_axis = argument(source, 0, "input")
    if canonical_name(node) != "view" or canonical_name(source) != "expand" or not isinstance(new_axis, Node):
        return node
    x = argument(new_axis, 0, "input")
    wide, narrow = example(source), example(x)
    if wide is None or wide.dim() != 5 or narrow is None or narrow.dim() != 4 or not _inserts_third(new_axis):
        return node
    batch, heads, times, keys, width = wide.shape
    if not static((heads, times)):
        return node
    fits = same_shape(narrow.shape, (batch, heads, keys, width))
    return x if fits and same_shape(whole.shape, (batch, heads * times, keys, width)) else node


def _inserts_third(node: Node) -> bool:
    """Whether a call gives [B, H, 1, S, D] of [B, H, S, D]."""
    if canonical_name(node) == "unsqueeze":
        return argument(node, 1, "dim") in (2, -3)
    index: Any = node.args[1] if canonical_name(node) == "getitem" else None
    everything = slice(None)
    padded = (*index, *[everything] * (5 - len(index))) if isinstance(index, tuple) else ()
    return padded == (everything, everything, None, everything, everything)


def _rank(node: Node) -> int:
    return tensor_of(node).dim()
