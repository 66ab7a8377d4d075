"""One launch writes a token's keys and values into their caches and applies the rotary embedding to keys and queries.

    kr = k * cos + cat(-k₂, k₁) * sin                          →   qr = write_cache_(keys, values, k, v, i, q, cos, sin)
    qr = q * cos + cat(-q₂, q₁) * sin
    index_copy_(keys, 2, i, kr); index_copy_(values, 2, i, v)

There are few elements, so that separate launches would take longer than the memory traffic. On a graph whose writes are
in place.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from tilewright.choose.chooser import chosen
from tilewright.graph import calls
from tilewright.graph.canonical import is_last
from tilewright.graph.insert import insert_call
from tilewright.graph.views import base_of, part_of
from tilewright.hardware.target import Target
from tilewright.kernels.device import NARROW
from tilewright.kernels.offer import Offer
from tilewright.passes.rule import Value, call, matches, roots
from tilewright.passes.simplify import is_pure
from tilewright.passes.units import behind_views

aten: Any = torch.ops.aten
MOST_TOKENS = 64
"""New tokens of a batch entry that one launch writes."""
AXIS = Value("axis")
WRITE = (
    call(aten.index_copy_.default, "cache", 2, "place", "value"),
    call(aten.index_put_.default, "cache", [None, None, "place"], "value"),
)
TURNED = call("cat", [call("neg", "second"), "first"], AXIS)
LOW = call("sub", call("mul", "first", "cos"), call("mul", "second", "sin"))
HIGH = call("add", call("mul", "second", "cos"), call("mul", "first", "sin"))
ROTARY = call("add", call("mul", "x", "cos"), call("mul", TURNED, "sin")), call("cat", [LOW, HIGH], AXIS)


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


def offers(graph: fx.Graph, target: Target) -> Iterator[Sequence[Offer]]:
    """An offer for each pair of writes that can be one, in an inference graph of ATen operators."""
    if target.language != "triton":
        return
    writes = [write for node in roots(WRITE, graph) if (write := _write(node)) is not None]
    while len(writes) > 1:
        first, second, *rest = writes
        if _is_pair(first, second):
            yield [_Pair(first, second).offer()]
            writes = rest
        else:
            writes = writes[1:]


def _write(node: fx.Node) -> _Write | None:
    found = next(matches(WRITE, node), None)
    if found is None or node.users:
        return None
    memory, at, new = (calls.tensor(found[name]) for name in ("cache", "place", "value"))
    batch, heads, _, width = memory.shape if memory.dim() == 4 else (0, 0, 0, 0)
    tokens = at.shape[0] if at.dim() == 1 and at.dtype in (torch.int64, torch.int32) else 0
    fits = width % 2 == 0 and new.dtype == memory.dtype and memory.dtype in NARROW and memory.stride(-1) == 1
    if not 0 < tokens <= MOST_TOKENS or not fits or new.numel() != batch * heads * tokens * width:
        return None
    return _Write(node, found["cache"], found["place"], found["value"])


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


class _Pair:
    """Keys and values at the same places of their caches, with what is turned by the rotary embedding's angles."""

    def __init__(self, first: _Write, second: _Write) -> None:
        self.first, self.second, self.place = first, second, second.node
        self.keys, self.values = (second, first) if _rotary(_unwidened(second.value)) else (first, second)
        batch, heads, _, width = calls.shape_of(self.keys.cache.meta["val"])
        self.shape = batch, heads, calls.shape_of(self.keys.place.meta["val"])[0], width
        found = _rotary(_unwidened(self.keys.value))
        is_turned = found is not None and _fits(found, self.shape) and bool(found.node.users)
        self.turned = found if is_turned else None
        others = _others(self.turned, self.place) if self.turned else iter(())
        self.queries = next((q for q in others if _fits(q, (batch, -1, *self.shape[2:]))), None)

    def offer(self) -> Offer:
        what = "tilewright.write_cache_" + (", with the rotary embedding" if self.turned else "")
        what += ", also of the queries" if self.queries else ""
        both = "the writes of a token's keys and values"
        return Offer(what, both, self.second.node, self.apply, producer=self.first.node)

    def apply(self) -> fx.Node:
        import tilewright.kernels.cache_write  # noqa: F401, what defines the operator

        place, (batch, heads, tokens, width) = self.place, self.shape
        k, cos, sin = self.keys.value, None, None
        if self.turned is not None:
            k = self.turned.x
            cos, sin = (insert_call(place, aten.expand.default, x, [batch, 1, tokens, -1]) for x in self.turned[2:])
        given = k, self.values.value
        k, v = (insert_call(place, aten.expand.default, x, [batch, heads, tokens, width]) for x in given)
        q = None if self.queries is None else self.queries.x
        target: Any = torch.ops.tilewright.write_cache_.default
        new = insert_call(place, target, self.keys.cache, self.values.cache, k, v, self.keys.place, q, cos, sin)
        if self.queries is not None:
            self.queries.node.replace_all_uses_with(new)
        for write in (self.first, self.second):
            write.node.graph.erase_node(write.node)
        return new


def _unwidened(node: fx.Node) -> fx.Node:
    """The tensor that `node` shows, if only axes of size 1 are added or removed; else `node` itself."""
    base = base_of(node)
    sizes = [[size for size in calls.shape_of(x.meta["val"]) if size != 1] for x in (node, base)]
    return base if sizes[0] == sizes[1] else node


def _rotary(node: fx.Node) -> _Rotary | None:
    """The rotary embedding whose result is `node`; it pairs elements of the first half with those of the second."""
    for found in matches(ROTARY, node):
        first, second = found["first"], found["second"]
        x: Any = found["x"] if "x" in found else _whole(first)
        is_turned = x is not None and is_last(found["axis"], calls.tensor(x).dim())
        if is_turned and _is_half(first, x, 0) and _is_half(second, x, 1):
            return _Rotary(node, x, found["cos"], found["sin"])
    return None


def _whole(part: fx.Node) -> fx.Node | None:
    """The tensor of which `part` is a slice or a chunk."""
    source = part.args[0] if part.target in (operator.getitem, aten.slice.Tensor) else None
    if part.target is operator.getitem and isinstance(source, fx.Node):
        source = source.args[0] if source.args else None
    return source if isinstance(source, fx.Node) else None


def _is_half(node: fx.Node, x: fx.Node, number: int) -> bool:
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
    for node in roots(ROTARY, place.graph):
        other = _rotary(node) if order[node] < order[place] else None
        if other is None or node is found.node or other[2:] != found[2:]:
            continue
        if node.users and all(order[reader] > order[place] for reader in node.users):
            yield other


write_caches = chosen("cache writes", offers)
