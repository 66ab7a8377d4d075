"""One launch writes a token's keys and values into their caches and applies the rotary embedding to keys and queries.

    kr = k * cos + cat(-k₂, k₁) * sin                          →   qr = write_cache_(keys, values, k, v, i, q, cos, sin)
    qr = q * cos + cat(-q₂, q₁) * sin
    index_copy_(keys, 2, i, kr); index_copy_(values, 2, i, v)

There are few elements, so that separate launches would take longer than the memory traffic. On a graph whose writes are
in place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_call
from tilewright.graph.source import source_line
from tilewright.graph.views import part_of
from tilewright.hardware.target import Target
from tilewright.kernels.device import NARROW
from tilewright.passes.simplify import drop_unread, is_pure
from tilewright.passes.units import behind_views
from tilewright.records.program import Decision

aten: Any = torch.ops.aten
MOST_TOKENS = 64
"""New tokens of a batch entry that one launch writes."""


class _Write(NamedTuple):
    """index_copy_(cache, 2, place, value), also as index_put_."""

    node: fx.Node
    cache: fx.Node
    place: fx.Node
    value: fx.Node


class _Rotary(NamedTuple):
    """x · cos + (-x₂, x₁) · sin, or (x₁ · cos - x₂ · sin, x₂ · cos + x₁ · sin) with angles half as wide."""

    node: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node


def write_caches(graph: fx.Graph, target: Target) -> list[Decision]:
    """Rewrite an inference graph of ATen operators in place; a decision for each pair of writes that became one."""
    if target.language != "triton":
        return []
    decisions = []
    writes = [write for node in graph.nodes if (write := _write(node)) is not None]
    while len(writes) > 1:
        first, second, *rest = writes
        if _is_pair(first, second):
            decisions.append(_join(first, second))
            writes = rest
        else:
            writes = writes[1:]
    if decisions:
        drop_unread(graph)
    return decisions


def _write(node: fx.Node) -> _Write | None:
    args: tuple[Any, ...] = node.args
    if node.target is aten.index_copy_.default and len(args) == 4:
        cache, axis, place, value = args
    elif node.target is aten.index_put_.default and len(args) == 3 and len(args[1]) == 3:
        cache, (*others, place), value = args
        axis = 2 if others == [None, None] else -1
    else:
        return None
    given = (cache, place, value)
    if axis != 2 or node.users or not all(isinstance(x, fx.Node) for x in given):
        return None
    memory, at, new = (calls.output(x) for x in given)
    if memory is None or at is None or new is None:
        return None
    batch, heads, _, width = memory.shape if memory.dim() == 4 else (0, 0, 0, 0)
    tokens = at.shape[0] if at.dim() == 1 and at.dtype in (torch.int64, torch.int32) else 0
    fits = width % 2 == 0 and new.dtype == memory.dtype and memory.dtype in NARROW and memory.stride(-1) == 1
    if not 0 < tokens <= MOST_TOKENS or not fits or new.numel() != batch * heads * tokens * width:
        return None
    return _Write(node, cache, place, value)


def _is_pair(first: _Write, second: _Write) -> bool:
    """Whether two writes follow each other, at the same places of caches of the same shape."""
    shapes = [calls.shape_of(write.cache.meta["val"]) for write in (first, second)]
    if first.place is not second.place or shapes[0] != shapes[1] or behind_views(first.cache) is second.cache:
        return False
    node = first.node.next
    while node is not second.node:
        if node.op != "call_function" or not is_pure(node):
            return False
        node = node.next
    return True


def _join(first: _Write, second: _Write) -> Decision:
    import tilewright.kernels.cache_write  # noqa: F401, what defines the operator

    place = second.node
    keys, values = (second, first) if _rotary(_unwidened(second.value)) else (first, second)
    batch, heads, _, width = calls.shape_of(keys.cache.meta["val"])
    tokens = calls.shape_of(keys.place.meta["val"])[0]
    found = _rotary(_unwidened(keys.value))
    turned = found is not None and _fits(found, (batch, heads, tokens, width)) and list(found.node.users)
    k, cos, sin, queries = keys.value, None, None, None
    if found is not None and turned:
        k = found.x
        queries = next((q for q in _others(found, place) if _fits(q, (batch, -1, tokens, width))), None)
        cos, sin = (insert_call(place, aten.expand.default, x, [batch, 1, tokens, -1]) for x in found[2:])
    k, v = (insert_call(place, aten.expand.default, x, [batch, heads, tokens, width]) for x in (k, values.value))
    q = None if queries is None else queries.x
    target: Any = torch.ops.tilewright.write_cache_.default
    new = insert_call(place, target, keys.cache, values.cache, k, v, keys.place, q, cos, sin)
    if queries is not None:
        queries.node.replace_all_uses_with(new)
    for write in (first, second):
        write.node.graph.erase_node(write.node)
    what = "keys and values of a token in one launch" + (", with their rotary embedding" if cos is not None else "")
    what += ", and the queries" if queries is not None else ""
    return Decision(
        "forward", first.node.name, new.name, "taken", what, source=source_line(new), passed_by="cache writes"
    )


def _unwidened(node: fx.Node) -> fx.Node:
    """The operand of views that only add or remove axes of size 1."""

    def keeps_other_axes(view: fx.Node) -> bool:
        if not calls.is_view(view) or view.target is operator.getitem:
            return False
        seen, shown = (calls.shape_of(x.meta["val"]) for x in (view, view.all_input_nodes[0]))
        return [size for size in seen if size != 1] == [size for size in shown if size != 1]

    return calls.through(node, keeps_other_axes)


def _rotary(node: fx.Node) -> _Rotary | None:
    """The rotary embedding whose result is `node`; it pairs elements of the first half with those of the second."""
    if node.target is aten.cat.default:
        return _by_halves(node)
    if node.target is not aten.add.Tensor or node.kwargs:
        return None
    for straight, crossed in (node.args, node.args[::-1]):
        first, second = _factors(straight), _factors(crossed)
        for x, cos in first:
            for halves, sin in second:
                if _is_half_turn(halves, x):
                    return _Rotary(node, x, cos, sin)
    return None


def _by_halves(node: fx.Node) -> _Rotary | None:
    args: tuple[Any, ...] = node.args
    if len(args[0]) != 2 or len(args) < 2 or args[1] not in (-1, calls.output(node).dim() - 1):  # type: ignore[union-attr]
        return None
    low, high = args[0]
    if low.target is not aten.sub.Tensor or high.target is not aten.add.Tensor or low.kwargs or high.kwargs:
        return None
    for first, cos in _factors(low.args[0]):
        for second, sin in _factors(low.args[1]):
            crossed = [{*_factors(term)} for term in high.args]
            fits = any((second, cos) in one and (first, sin) in other for one, other in (crossed, crossed[::-1]))
            x = _whole(first)
            if fits and x is not None and _is_half(first, x, 0) and _is_half(second, x, 1):
                return _Rotary(node, x, cos, sin)
    return None


def _whole(part: fx.Node) -> fx.Node | None:
    """The tensor of which `part` is a slice or a chunk."""
    source = part.args[0] if part.target in (operator.getitem, aten.slice.Tensor) else None
    if part.target is operator.getitem and isinstance(source, fx.Node):
        source = source.args[0] if source.args else None
    return source if isinstance(source, fx.Node) else None


def _factors(node: object) -> Iterator[tuple[fx.Node, fx.Node]]:
    if isinstance(node, fx.Node) and node.target is aten.mul.Tensor and all(isinstance(x, fx.Node) for x in node.args):
        a, b = node.args
        yield a, b  # type: ignore[misc]
        yield b, a  # type: ignore[misc]


def _is_half_turn(node: fx.Node, x: fx.Node) -> bool:
    """Whether `node` is (-x₂, x₁) along the last axis."""
    args: tuple[Any, ...] = node.args
    if node.target is not aten.cat.default or len(args[0]) != 2:
        return False
    value, (negated, first), axis = calls.output(x), args[0], args[1] if len(args) > 1 else 0
    if value is None or axis not in (-1, value.dim() - 1) or negated.target is not aten.neg.default:
        return False
    return _is_half(first, x, 0) and _is_half(negated.args[0], x, 1)


def _is_half(node: object, x: fx.Node, number: int) -> bool:
    if not isinstance(node, fx.Node):
        return False
    value, whole, (base, offset), (other, begin) = node.meta["val"], x.meta["val"], part_of(node), part_of(x)
    half = whole.shape[-1] // 2
    lies = value.shape == (*whole.shape[:-1], half) and value.stride() == whole.stride()
    return bool(lies and base is other and offset == begin + number * half * whole.stride(-1))


def _fits(found: _Rotary, shape: tuple[int, ...]) -> bool:
    """Whether heads [batch, heads, tokens, width] share their angles and have the layout that the kernel requires."""
    x, result, cos, sin = (node.meta["val"] for node in found[1:2] + found[:1] + found[2:])
    sizes = calls.shape_of(x)
    if len(sizes) != 4 or any(size not in (-1, own) for size, own in zip(shape, sizes, strict=True)):
        return False
    wide = 1 if found.node.target is aten.add.Tensor else 2
    angles = all(y.dim() < 3 or y.shape[-3] == 1 for y in (cos, sin))
    angles = angles and wide * cos.shape[-1] == wide * sin.shape[-1] == sizes[-1]
    return bool(angles and x.stride(-1) == 1 and result.is_contiguous() and result.dtype == x.dtype)


def _others(found: _Rotary, place: fx.Node) -> Iterator[_Rotary]:
    """Other rotary embeddings by the same angles, computed before `place` and read only after it."""
    order = {node: number for number, node in enumerate(place.graph.nodes)}
    for node in place.graph.nodes:
        other = _rotary(node) if node.op == "call_function" and order[node] < order[place] else None
        if other is None or node is found.node or other[2:] != found[2:]:
            continue
        if node.users and all(order[reader] > order[place] for reader in node.users):
            yield other
