"""Gradients of embeddings are summed in tilewright's kernel on a GPU, those of several tables at once.

    dw = embedding_dense_backward(dy, indices, …)   →   keys, order = sort(to_copy(view(indices), int16))
                                                        dw = embedding_sums(dy, keys, order, sorted_bounds(keys), …)

    db = _embedding_bag_backward(dy, indices, …)    →   dw = embedding_dense_backward(dy[offset2bag], indices, …)

PyTorch sorts too, but its sums reach only 0.08 of a copy's bandwidth (H200, bf16, 65536 positions in 50257 × 4096;
tilewright's 0.75, with the sort). A bag's gradient takes PyTorch some 27 launches: 11 ms of the host for 26 tables.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from tilewright.choose.chooser import chosen
from tilewright.cost.work import Work
from tilewright.graph import calls
from tilewright.graph.insert import insert_call, insert_formula
from tilewright.graph.insert import replace as replace_node
from tilewright.hardware.target import Target
from tilewright.kernels.device import DTYPES
from tilewright.kernels.offer import Offer
from tilewright.passes.index.embeddings import Group, groups_of
from tilewright.passes.index.sorted_rows import narrowest, sort_keys

aten = torch.ops.aten
GRADIENT = aten.embedding_dense_backward.default
MEAN, MAXIMUM = 1, 2
"""PyTorch's numbers for the modes of an embedding bag."""
UNSORTED = 768
"""Positions up to which PyTorch, at 0.04 µs each, is predicted to be faster than a sort with the sums. Their 28 µs are
estimated from kernels of other sizes (H200); the crossing itself was not measured."""
SORTED_US, PER_US = 28.0, 4000
"""Least time of a sort with bounds and sums, and the keys that a sort takes per µs beyond that (H200)."""
UNSORTED_US = 0.04
"""Time of PyTorch's sums without a sort, per position."""
CLEAR = 0.8
"""One sum pays if it is predicted to take less than this share of the time of all."""


def offers(graph: fx.Graph, target: Target) -> Iterator[Sequence[Offer]]:
    """Offers for the gradients of embeddings in a joint graph of ATen operators: for several at once, then for each."""
    if target.language != "triton":
        return
    for bags in graph.find_nodes(op="call_function", target=aten._embedding_bag_backward.default):
        _take_bags_apart(bags)
    found = graph.find_nodes(op="call_function", target=GRADIENT)
    for group in groups_of([node for node in found if not _refusal(node)]):
        yield [_of_tables(group)]
    for node in graph.find_nodes(op="call_function", target=GRADIENT):
        yield [_of_one(node)]


def _of_tables(group: Group) -> Offer:
    count, positions, moved = len(group.gradients), group.positions, group.stacked_bytes
    copies = (Work("pointwise", moved, moved),) if moved else ()
    return Offer(
        f"one sum of {positions} positions each", f"the gradients of {count} tables", group.gradients[0], group.apply,
        work=(SORTED_US + count * positions / PER_US, *copies),
        instead=(count * min(UNSORTED_US * positions, SORTED_US),), clear=CLEAR,
    )  # fmt: skip


def _of_one(node: fx.Node) -> Offer:
    count, refusal = calls.tensor(node.args[1]).numel(), _refusal(node)
    if not refusal and count <= UNSORTED:
        refusal = f"PyTorch adds up {count} positions without sorting them"
    kernel = f"tilewright.embedding_sums of {count} sorted positions"
    return Offer(kernel, "embedding_dense_backward", node, lambda: _apply(node), refusal)


def _refusal(node: fx.Node) -> str | None:
    """Why tilewright's kernel does not take a gradient."""
    if node.args[4]:
        return "it is scaled by the frequency of the indices"
    dtype = calls.tensor(node.args[0]).dtype
    return None if dtype in DTYPES else f"its kernel is not for {dtype}"


def _apply(node: fx.Node) -> fx.Node:
    dout, indices, entries, padding = node.args[:4]
    dtype = narrowest(entries) if isinstance(entries, int) else torch.int32
    keys = insert_call(node, aten._to_copy.default, indices, dtype=dtype, memory_format=torch.contiguous_format)
    keys = insert_call(node, aten.view.default, keys, [-1])
    ranked = sort_keys(node, keys, entries)
    new = insert_call(node, torch.ops.tilewright.embedding_sums.default, dout, *ranked, entries, padding)
    replace_node(node, new)
    return new


def _take_bags_apart(bags: fx.Node) -> None:
    """Rewrite the gradient of bags that are summed or averaged as that of an embedding; other modes stay."""
    dout, indices, _, bag_of, sizes, _, entries, by_frequency, mode, sparse, weights, *rest = bags.args
    padding = rest[0] if rest else bags.kwargs.get("padding_idx", -1)
    value = calls.output(dout)  # type: ignore[arg-type]
    if by_frequency or mode == MAXIMUM or sparse or weights is not None or value is None or value.dtype not in DTYPES:
        return

    def formula(dout: Tensor, indices: Tensor, bag_of: Tensor, sizes: Tensor) -> Tensor:
        rows = aten.index.Tensor(dout, [bag_of])
        if mode == MEAN:
            rows = (rows.float() / aten.index.Tensor(sizes, [bag_of])[:, None]).to(dout.dtype)
        found: Tensor = aten.embedding_dense_backward(rows, indices, entries, padding, False)
        return found

    replace_node(bags, insert_formula(bags, formula, dout, indices, bag_of, sizes))


sum_sorted = chosen("embeddings", offers)
