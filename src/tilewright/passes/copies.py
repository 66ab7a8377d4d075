"""Replaces copies by their original if both have one layout and neither is written to or returned.

    h = exp(x); c = clone(h); y = sin(c)     →   h = exp(x); y = sin(h)

A dropout that draws nothing (p = 0, or evaluation) is captured as such a copy. A copy stays if it changes the layout,
if its original does not begin at a multiple of 16 bytes, if one of the two is written to, or if the caller holds one of
them or a view of it and may write to it, even between forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.layouts import layout
from tilewright.graph.writes import shows_operand, written
from tilewright.passes.rule import call, rule


def _is_needless(node: fx.Node, original: fx.Node) -> bool:
    if layout(node) != layout(original) or not _begins_aligned(original):
        return False
    original = calls.through(original, shows_operand)
    readers = [*_readers(node), *_readers(original)]
    return original.op == "call_function" and not any(
        reader.op == "output" or operand in written(reader) for operand, reader in readers
    )


def _begins_aligned(node: fx.Node) -> bool:
    """Whether a tensor is known to begin at a multiple of 16 bytes, as library kernels require."""
    value = calls.output(node)
    begin = None if value is None else value.storage_offset() * value.itemsize
    return not isinstance(begin, int) or begin % 16 == 0


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Every call that reads the storage of `node`, with the view that it reads."""
    for user in node.users:
        yield node, user
        if shows_operand(user):
            yield from _readers(user)


@rule(call(torch.ops.aten.clone.default, "original", ...), where=_is_needless)
def drop_copies(node: fx.Node, original: fx.Node) -> fx.Node:
    return original
