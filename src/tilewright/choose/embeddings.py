"""Gradients of embeddings are summed in tilewright's kernel on a GPU, those of several tables at once.

    dw = embedding_dense_backward(dy, indices, …)   →   keys, order = sort(to_copy(view(indices), int16))
                                                        dw = embedding_sums(dy, keys, order, sorted_bounds(keys), …)

    db = _embedding_bag_backward(dy, indices, …)    →   dw = embedding_dense_backward(dy[offset2bag], indices, …)

    dw[t] = embedding_dense_backward(dy[t], indices[t], n[t], …)      for several tables t
    →
    keys, order = sort(stack(indices) + begin); dw = embedding_sums(stack(dy), keys, order, …)
    dw[t] = slice(dw, 0, begin[t], begin[t] + n[t])

PyTorch sorts too, but its sums reach only 0.08 of a copy's bandwidth (H200, bf16, 65536 positions in 50257 × 4096;
tilewright's 0.75, with the sort). A bag's gradient takes PyTorch some 27 launches: 11 ms of the host for 26 tables.
Tables that look up as many rows of one width are one sum, since the sort of each takes 17 launches, and a longer one
hardly more. Keys of padding come last and are not summed; each gradient has the bits of a sum of its own. Gradients
that another operator reads stay: they may be added to a product in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.choose.chooser import chosen
from tilewright.cost.work import Work
from tilewright.graph import calls
from tilewright.graph.insert import insert_call, insert_formula
from tilewright.graph.insert import replace as replace_node
from tilewright.graph.specialise import has_symbols
from tilewright.hardware.target import Target
from tilewright.kernels.device import DTYPES
from tilewright.kernels.offer import Offer
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
ROWS = 64
"""A table begins at a multiple of this many rows of the sum, and so at a multiple of 128 bytes."""


def offers(graph: fx.Graph, target: Target) -> Iterator[Sequence[Offer]]:
    """Offers for the gradients of embeddings in a joint graph of ATen operators: for several at once, then for each."""
    if target.language != "triton":
        return
    for bags in graph.find_nodes(op="call_function", target=aten._embedding_bag_backward.default):
        _take_bags_apart(bags)
    found = graph.find_nodes(op="call_function", target=GRADIENT)
    for group in _groups([node for node in found if not _refusal(node)]):
        yield [_of_tables(group)]
    for node in graph.find_nodes(op="call_function", target=GRADIENT):
        yield [_of_one(node)]


def _groups(gradients: Sequence[fx.Node]) -> Iterator[list[fx.Node]]:
    """Those of these gradients that can be one sum."""
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in gradients:
        given, places = calls.tensor(node.args[0]), calls.tensor(node.args[1])
        known = isinstance(node.args[2], int) and not has_symbols(given) and not has_symbols(places)
        if known and places.dim() and all(user.op == "output" for user in node.users):
            groups.setdefault((given.dtype, given.shape, places.dtype, node.args[3]), []).append(node)
    yield from (group for group in groups.values() if len(group) > 1 and _begins(group)[-1] < 2**31)


def _begins(group: Sequence[fx.Node]) -> list[int]:
    """The row of the sum at which each table begins, and their end."""
    return [*accumulate((-(-calls.number(node.args[2]) // ROWS) * ROWS for node in group), initial=0)]


def _of_tables(group: Sequence[fx.Node]) -> Offer:
    count, positions = len(group), calls.tensor(group[0].args[1]).numel()
    moved = count * calls.nbytes(group[0].all_input_nodes[0])
    return Offer(
        f"one sum of {positions} positions each", f"the gradients of {count} tables", group[0],
        lambda: _apply_together(group),
        work=(SORTED_US + count * positions / PER_US, Work("pointwise", moved, moved)),
        instead=(count * min(UNSORTED_US * positions, SORTED_US),), clear=CLEAR,
    )  # fmt: skip


def _apply_together(group: Sequence[fx.Node]) -> fx.Node:
    """Insert the sum in front of the last of the group; the part of the first."""
    last, padding = group[-1], calls.number(group[0].args[3])
    entries = [calls.number(node.args[2]) for node in group]
    *begins, total = _begins(group)

    def formula(*given: Tensor) -> tuple[Tensor, Tensor]:
        rows, places = torch.stack(given[: len(group)]), torch.stack(given[len(group) :])
        table = torch.arange(len(group), device=places.device).view(-1, *[1] * (places.dim() - 1))
        # An index out of bounds stays out of bounds.
        keys = torch.where((places >= 0) & (places < _of_table(table, entries)), places + _of_table(table, begins), -1)
        if padding >= 0:
            keys = torch.where(places == padding, total, keys)
        return rows.flatten(0, -2), keys.to(narrowest(total + 1)).flatten()

    rows, keys = insert_formula(last, formula, *(node.args[place] for place in (0, 1) for node in group))
    ranked = sort_keys(last, keys, total + 1)
    found = insert_call(last, torch.ops.tilewright.embedding_sums.default, rows, *ranked, total + 1, total)
    ends = zip(group, begins, entries, strict=True)
    parts = [insert_call(last, aten.slice.Tensor, found, 0, begin, begin + n) for _, begin, n in ends]
    for node, part in zip(group, parts, strict=True):
        replace_node(node, part)
    return parts[0]


def _of_table(table: Tensor, values: Sequence[int]) -> Tensor | int:
    """values[table], computed: a constant, a progression, or steps."""
    steps = [b - a for a, b in pairwise(values)]
    if len(set(steps)) == 1:
        return values[0] + table * steps[0] if steps[0] else values[0]
    return sum(((table > k) * step for k, step in enumerate(steps)), start=torch.full_like(table, values[0]))


def _of_one(node: fx.Node) -> Offer:
    count, refusal = prod(calls.shape_of(calls.tensor(node.args[1]))), _refusal(node)
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
