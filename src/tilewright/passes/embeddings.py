"""Gradients of embeddings on a GPU are sums of sorted positions, in tilewright's kernel.

dw = embedding_dense_backward(dy, indices, …)   →   keys, order = sort(to_copy(view(indices), int32))
                                                    dw = embedding_sums(dy, keys, order, …)

PyTorch's kernels sort, too, and then reach 0.08 of a copy (H200, bf16, 65536 positions in 50257 × 4096; the sums 0.75,
with their sort). Few positions it adds up without sorting: those stay.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_call
from tilewright.graph.source import source_line
from tilewright.hardware.target import Target
from tilewright.passes.units import behind_views
from tilewright.records.program import Decision

aten = torch.ops.aten
UNSORTED = 3072
"""PyTorch sorts where there are more positions (`Embedding.cu`)."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sum_sorted(graph: fx.Graph, target: Target) -> list[Decision]:
    """Rewrite `graph`, a joint graph of ATen operators, in place; a decision for each gradient of an embedding."""
    if target.language != "triton":
        return []
    gradients = graph.find_nodes(op="call_function", target=aten.embedding_dense_backward.default)
    return [_decide(node) for node in gradients]


def _decide(node: fx.Node) -> Decision:
    dout, indices, entries, padding, by_frequency = node.args
    assert isinstance(dout, fx.Node) and isinstance(indices, fx.Node)
    given, places = calls.output(dout), calls.output(indices)
    assert given is not None and places is not None
    producer, source, refusal = behind_views(dout).name, source_line(node), None
    if by_frequency:
        refusal = "it is scaled by the frequency of the indices"
    elif given.dtype not in DTYPES:
        refusal = f"its kernel is not for {given.dtype}"
    elif (count := places.numel()) <= UNSORTED:
        refusal = f"PyTorch adds up {count} positions without sorting them"
    if refusal:
        reason = f"tilewright.embedding_sums does not take embedding_dense_backward: {refusal}"
        return Decision("backward", producer, node.name, "refused", reason, source=source, passed_by="embeddings")
    new = _apply(node, dout, indices, entries, padding)
    reason = f"{count} positions are sorted and summed in tilewright's kernel, in place of embedding_dense_backward"
    return Decision("backward", producer, new.name, "taken", reason, source=source, passed_by="embeddings")


def _apply(node: fx.Node, dout: fx.Node, indices: fx.Node, entries: Any, padding: Any) -> fx.Node:
    from tilewright.kernels import embedding as _defines_the_operators  # noqa: F401

    keys = insert_call(node, aten._to_copy.default, indices, dtype=torch.int32, memory_format=torch.contiguous_format)
    keys = insert_call(node, aten.view.default, keys, [-1])
    ranked = insert_call(node, aten.sort.stable, keys, stable=True)
    parts = [insert_call(node, operator.getitem, ranked, i) for i in range(2)]
    new = insert_call(node, torch.ops.tilewright.embedding_sums.default, dout, *parts, entries, padding)
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return new
