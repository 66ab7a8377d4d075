"""Writes to inputs: in place where no later call reads the old value, small ones joined into one call at the end.

    c = index_put(cache, [None, None, i], k)                →   index_put_(cache, [None, None, i], k)
    y = attention(q, c, …); copy_(cache, c)                 →   y = attention(q, cache, …)

    c = slice_scatter(cache, copy(slice(cache, 2, 3, 4), k), 2, 3, 4)
    y = attention(q, c, …); copy_(cache, c)
        →   copy_(slice(cache, 2, 3, 4), k); y = attention(q, cache, …)

AOTAutograd makes a new tensor for each write, and copies the last one back at the end: twice the traffic of the whole
cache to change one token's keys. Written values do not depend on overwritten ones, so a restarted call writes the same.

    copy_(a, x); copy_(b, y); …              →   _foreach_copy_([a, b, …], [x, y, …])
    copy_(n, add(n, 1)); …                   →   _foreach_add_([n, …], 1)

A network of 53 batch norms in training writes 106 vectors and increments 53 counters: 212 launches.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from tilewright.graph.calls import arguments, nbytes, readers, strides_of
from tilewright.graph.insert import insert_call, insert_known
from tilewright.graph.views import maker
from tilewright.hardware.target import Target
from tilewright.passes.rule import undecided
from tilewright.passes.simplify import drop_unread
from tilewright.records.errors import Refusal
from tilewright.records.program import Decision

aten: Any = torch.ops.aten
BY_INDEX = {aten.index_put.default: aten.index_put_.default, aten.index_copy.default: aten.index_copy_.default}
"""Functional writes, and the in-place operators of the same arguments."""
BY_VIEW = {aten.slice_scatter.default: aten.slice.Tensor, aten.select_scatter.default: aten.select.int}
"""Functional writes of their second argument, and the operator of the view that they write to; it takes the first
argument and those from the third on."""


def write_in_place(graph: fx.Graph, target: Target) -> list[Decision]:
    """Rewrite an inference, forward or backward graph in place; returns a decision for each partly written input."""
    copies = [node for node in graph.nodes if node.target is aten.copy_.default and node.args[0].op == "placeholder"]
    found = ((copy, *_writes(copy.args[1])) for copy in copies)
    decisions = [_decide(copy, writes) for copy, writes, memory in found if writes and memory is copy.args[0]]
    drop_unread(graph)
    return decisions


def _decide(copy: fx.Node, writes: Sequence[fx.Node]) -> Decision:
    memory, first, last = copy.args[0], writes[0], writes[-1]
    assert isinstance(memory, fx.Node)
    here = replace(undecided(last, "in place"), producer=first.name, consumer=memory.name)
    try:
        _check(copy, writes)
    except Refusal as refusal:
        return replace(here, reason=f"is copied as a whole: {refusal}")
    for write in writes:
        _write(write, write, memory)
    last.replace_all_uses_with(memory)
    copy.replace_all_uses_with(memory)
    copy.graph.erase_node(copy)
    reason, saved = "is written in place, and not copied as a whole", 4 * nbytes(memory)
    return replace(here, verdict="taken", reason=reason, bytes_saved=saved)


def _writes(value: Any) -> tuple[list[fx.Node], Any]:
    """The writes to parts of a tensor that give `value`, in order, and that tensor."""
    found: list[fx.Node] = []
    while isinstance(value, fx.Node) and (value.target in BY_INDEX or value.target in BY_VIEW):
        found.insert(0, value)
        value = value.args[0]
    return found, value


def _writes_to_view(write: fx.Node) -> list[fx.Node]:
    """The writes to parts of a view that a `*_scatter` copies back; empty if its source is anything else."""
    found, view = _writes(write.args[1])
    shown = isinstance(view, fx.Node) and view.target is BY_VIEW[write.target]
    return found if shown and view.args == (write.args[0], *write.args[2:]) else []


def _plain_source(write: fx.Node) -> Any:
    """The value written to a view; for `copy(view, x)`, which uses only the shape and dtype of the view, x."""
    source = write.args[1]
    is_copy = isinstance(source, fx.Node) and source.target is aten.copy.default and len(source.users) == 1
    return source.args[1] if is_copy else source  # type: ignore[union-attr]


def _replaced_calls(writes: Sequence[fx.Node]) -> Iterator[fx.Node]:
    """The calls that are erased when these writes are rewritten."""
    for write in writes:
        yield write
        if write.target in BY_VIEW:
            if inside := _writes_to_view(write):
                yield from _replaced_calls(inside)
            elif _plain_source(write) is not write.args[1]:
                yield write.args[1]  # type: ignore[misc]


def _check(copy: fx.Node, writes: Sequence[fx.Node]) -> None:
    memory, last = copy.args[0], writes[-1]
    assert isinstance(memory, fx.Node)
    old, new = memory.meta["val"], last.meta["val"]
    if (old.dtype, old.shape, strides_of(old)) != (new.dtype, new.shape, strides_of(new)):
        raise Refusal("its new value has another layout")
    parts = set(_replaced_calls(writes))
    if any(reader.op == "output" for reader in readers(last)):
        raise Refusal("the caller also gets the new value")
    for version in (memory, *(parts - {last})):
        for reader in readers(version):
            if reader not in parts and reader is not copy:
                raise Refusal(f"{reader.name} reads it before the last write")
    for part in parts:
        if arguments(part).get("accumulate"):
            raise Refusal("a write adds to the old value")
        if any(maker(operand) is memory or operand in parts for operand in _values(part)):
            raise Refusal("a part of it is written to another")


def _values(part: fx.Node) -> list[fx.Node]:
    """The operands of a write except the memory that it writes to."""
    if part.target in BY_VIEW:
        source = _plain_source(part)
        return [] if _writes_to_view(part) or not isinstance(source, fx.Node) else [source]
    found: list[fx.Node] = []
    fx.map_arg((part.args[1:], part.kwargs), found.append)
    return found


def _write(before: fx.Node, write: fx.Node, memory: fx.Node) -> None:
    """`write` in place of what `memory` shows, as calls in front of `before`."""
    if write.target in BY_INDEX:
        insert_call(before, BY_INDEX[write.target], memory, *write.args[1:], **write.kwargs)
        return
    shown = insert_call(before, BY_VIEW[write.target], memory, *write.args[2:], **write.kwargs)
    inside = _writes_to_view(write)
    for part in inside:
        _write(before, part, shown)
    if not inside:
        insert_call(before, aten.copy_.default, shown, _plain_source(write))


MOST_BYTES = 64 * 1024
"""Larger results are copied at once, so that their memory is free until the end."""


def write_back_together(graph: fx.Graph, target: Target) -> None:
    """Rewrite `graph`, a forward or inference graph of ATen operators, in place."""
    if not target.is_gpu:
        return
    order = {node: place for place, node in enumerate(graph.nodes)}
    groups: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node.target is aten.copy_.default and _can_wait(node, order):
            groups[_kind(node)].append(node)
    for (number, _), copies in groups.items():
        if len(copies) > 1:
            _together(copies, number, graph.output_node())
    drop_unread(graph)


def _can_wait(copy: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether a copy between small tensors of one layout and dtype can move to the end of the graph."""
    into, value = copy.args[0], copy.args[1]
    if len(copy.args) > 2 or copy.users or not isinstance(into, fx.Node) or not isinstance(value, fx.Node):
        return False
    x, y = into.meta["val"], value.meta["val"]
    alike = (x.shape, x.stride(), x.dtype, x.device) == (y.shape, y.stride(), y.dtype, y.device)
    if into.op != "placeholder" or not alike or not x.is_contiguous() or x.numel() * x.itemsize > MOST_BYTES:
        return False
    # Values that show inputs stay: another copy at the end might overwrite them.
    return maker(value).op == "call_function" and all(order[user] <= order[copy] for user in into.users)


def _kind(copy: fx.Node) -> tuple[int | None, object]:
    """The number that is added to the input (None for other values), with dtype and device: one call takes one kind."""
    into, value = copy.args[0], copy.args[1]
    assert isinstance(into, fx.Node) and isinstance(value, fx.Node)
    x = into.meta["val"]
    counts = value.target is aten.add.Tensor and not value.kwargs and value.args[0] is into and len(value.users) == 1
    number = value.args[1] if counts and isinstance(value.args[1], int) else None
    return number, (x.dtype, x.device)


def _together(copies: list[fx.Node], number: int | None, end: fx.Node) -> None:
    inputs, values = ([copy.args[place] for copy in copies] for place in (0, 1))
    for copy in copies:
        copy.graph.erase_node(copy)
    if number is None:
        insert_known(end, aten._foreach_copy_.default, None, inputs, values)
    else:
        insert_known(end, aten._foreach_add_.Scalar, None, inputs, number)
