"""Needless copies: a copy is replaced by its original if both have one layout and neither is written to or returned.

    h = exp(x); c = clone(h); y = sin(c)     →   h = exp(x); y = sin(h)

A copy stays if its original does not begin at a multiple of 16 bytes, or if the caller holds one of them or a view of
it and may write to it, even between forward and backward. Casts to a wider dtype and back that have only views and
copies between them go too (`drop_round_trips`):

    w = _to_copy(x, float32); v = view(w, …); y = _to_copy(v, bfloat16)      →   y = view(x, …)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.layouts import before_widening, layout, widening_below
from tilewright.graph.views import maker, shows_operand, written
from tilewright.passes.rule import call, rule
from tilewright.passes.units import gradients


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


def drop_round_trips(graph: fx.Graph) -> None:
    """Rewrite `graph`, a joint or inference graph, in place; `simplify` erases calls without readers."""
    computed = gradients(graph)
    results = set(graph.output_node().all_input_nodes)
    for node in list(graph.nodes):
        if calls.operator_name(node.target) != "_to_copy":
            continue
        # Backward must not keep the memory of a forward result, since the caller may write to it.
        if node not in results or ((node in computed or not computed) and _is_alone(node, results)):
            _drop(node)


def _is_alone(node: fx.Node, results: set[fx.Node]) -> bool:
    """Whether the graph allocates the memory of the value that is cast, and returns nothing else that shares it."""
    cast = widening_below(node.all_input_nodes[0])
    if cast is None:
        return False
    memory = maker(cast.all_input_nodes[0])
    return memory.op == "call_function" and all(maker(other) is not memory for other in results)


def _drop(node: fx.Node) -> None:
    wide = node.all_input_nodes[0]
    cast = widening_below(wide)
    result = calls.output(node)
    source = None if cast is None else calls.output(cast.all_input_nodes[0])
    moved = calls.output(wide)
    if source is None or result is None or moved is None:
        return
    same = source.dtype == result.dtype and result.device == moved.device
    if same and calls.strides_of(result) == calls.strides_of(moved):
        found = before_widening(wide)
        if calls.strides_of(calls.output(found)) == calls.strides_of(result):  # type: ignore[arg-type]
            node.replace_all_uses_with(found)
