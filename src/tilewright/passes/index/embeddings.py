"""Gradients of embeddings: summed in tilewright's kernel on a GPU, and added in place to that of an output layer.

dw = embedding_dense_backward(dy, indices, …)   →   keys, order = sort(to_copy(view(indices), int16))
                                                    dw = embedding_sums(dy, keys, order, sorted_bounds(keys), …)

dw = add(slice(mm(…)), embedding_sums(dy, …))   →   add_embedding_sums_(slice(mm(…)), dy, …)
dw = add(slice(mm(…)), embedding_dense_backward(dy, indices, …))   →   index_add_(slice(mm(…)), 0, indices, dy)

db = _embedding_bag_backward(dy, indices, …)    →   dw = embedding_dense_backward(index(dy, [offset2bag]), indices, …)

The second and the third rewrite, in the backward graph, are for a table that is also the weight of the output layer:
only the rows that were looked up are read and written again (DeBERTa, 128,100 × 768 in bf16 on an H200: 49 µs for the
sums, 138 for the addition that it saves). The third is for a CPU (30,522 × 128 in fp32, 128 positions: 0.1 ms; the
zeros and the addition took 17; one thread, machine busy).

PyTorch sorts too, but its sums reach only 0.08 of a copy's bandwidth (H200, bf16, 65536 positions in 50257 × 4096;
tilewright's 0.75, with the sort). Up to 3072 positions PyTorch adds without sorting: 2048 in 32000 × 512 took 75 µs and
11 for the zeros, in 151936 × 1024 101 and 92. Up to `UNSORTED` positions its call stays. The last rewrite computes a
bag's gradient as that of its rows: PyTorch's takes some 27 launches, and 26 tables and 8192 bags took the host 11 ms.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_call, insert_formula
from tilewright.graph.insert import replace as replace_node
from tilewright.graph.writes import maker
from tilewright.hardware.target import Target
from tilewright.kernels.device import DTYPES, NARROW
from tilewright.passes.index.embedding_groups import join
from tilewright.passes.index.narrow_sorts import narrowest
from tilewright.passes.index.sorted_rows import sort_keys
from tilewright.passes.rule import call, cplusplus, rule, undecided
from tilewright.passes.units import readers
from tilewright.records.program import Decision

aten = torch.ops.aten
GRADIENT, ADD_ROWS = aten.embedding_dense_backward.default, aten.index_add_.default
ADDED = ("tilewright.add_embedding_sums_.default", "aten.index_add_.default")
MEAN, MAXIMUM = 1, 2
"""PyTorch's numbers for the modes of an embedding bag."""
UNSORTED = 768
"""Positions up to which PyTorch, at 0.04 µs each, is predicted to be faster than a sort with the sums. Their 28 µs are
estimated from kernels of other sizes (H200); the crossing itself was not measured."""


def sum_sorted(graph: fx.Graph, target: Target) -> list[Decision]:
    """Rewrite `graph`, a joint graph of ATen operators, in place; returns a decision for each embedding's gradient."""
    if target.language != "triton":
        return []
    for bags in graph.find_nodes(op="call_function", target=aten._embedding_bag_backward.default):
        _take_bags_apart(bags)
    found = graph.find_nodes(op="call_function", target=GRADIENT)
    joined = join([node for node in found if not _refusal(node)], target.profile)
    return joined + [_decide(node) for node in graph.find_nodes(op="call_function", target=GRADIENT)]


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


def _decide(node: fx.Node) -> Decision:
    dout, indices, entries, padding, _ = node.args
    assert isinstance(dout, fx.Node) and isinstance(indices, fx.Node)
    count, refusal = calls.tensor(indices).numel(), _refusal(node)
    here = replace(undecided(node, "embeddings", dout), graph="backward")
    if not refusal and count <= UNSORTED:
        refusal = f"PyTorch adds up {count} positions without sorting them"
    if refusal:
        reason = f"tilewright.embedding_sums does not take embedding_dense_backward: {refusal}"
        return replace(here, reason=reason)
    new = _apply(node, dout, indices, entries, padding)
    reason = f"{count} positions are sorted and summed in tilewright's kernel, in place of embedding_dense_backward"
    return replace(here, consumer=new.name, verdict="taken", reason=reason)


def _refusal(node: fx.Node) -> str | None:
    """Why tilewright's kernel does not take a gradient."""
    if node.args[4]:
        return "it is scaled by the frequency of the indices"
    dtype = calls.tensor(node.args[0]).dtype
    return None if dtype in DTYPES else f"its kernel is not for {dtype}"


def _apply(node: fx.Node, dout: fx.Node, indices: fx.Node, entries: Any, padding: Any) -> fx.Node:
    dtype = narrowest(entries) if isinstance(entries, int) else torch.int32
    keys = insert_call(node, aten._to_copy.default, indices, dtype=dtype, memory_format=torch.contiguous_format)
    keys = insert_call(node, aten.view.default, keys, [-1])
    ranked = sort_keys(node, keys, entries)
    new = insert_call(node, torch.ops.tilewright.embedding_sums.default, dout, *ranked, entries, padding)
    replace_node(node, new)
    return new


def _takes_sums(node: fx.Node, producer: fx.Node, table: fx.Node, target: Target) -> bool:
    """Whether `table` is a contiguous product, or slice of one, of the sum's shape and dtype, without other readers."""
    own, wanted, product = calls.tensor(table), calls.tensor(node), maker(table)
    if calls.class_of(product) != "compute" or (producer.target is GRADIENT and not cplusplus(target)):
        return False
    alike = (own.dtype, own.shape) == (wanted.dtype, wanted.shape) and own.is_contiguous()
    return alike and all(reader is node or str(reader.target) in ADDED for reader in readers(product))


@rule(
    call(aten.add.Tensor, "table", call(("embedding_sums", GRADIENT), ..., name="producer", alone=True)),
    where=_takes_sums,
    reason="is added to the product in place, at the rows that were looked up",
    saved=lambda node: 3 * calls.nbytes(node),
    by="embeddings",
    hand_written=True,
)
def add_sums_in_place(node: fx.Node, producer: fx.Node, table: fx.Node) -> fx.Node | None:
    if producer.target is GRADIENT:
        return table if _add_by_index(producer, table, node) else None
    dout, keys, order, bounds, _, padding = producer.args
    insert_call(node, torch.ops.tilewright.add_embedding_sums_.default, table, dout, keys, order, bounds, padding)
    return table


def _add_by_index(gradient: fx.Node, table: fx.Node, total: fx.Node) -> bool:
    """Add PyTorch's gradient of an embedding to `table` before `total`, unless it is of 16 bits."""
    operands: Any = gradient.args
    dout, indices, entries, padding, by_frequency = operands
    given, places = calls.output(dout), calls.output(indices)
    if given is None or places is None or given.dtype in NARROW or by_frequency:
        return False
    # PyTorch adds by index in one thread; it fills and adds whole tables in all of them.
    if not isinstance(entries, int) or not calls.is_known(places.numel()) or places.numel() > entries:
        return False

    def formula(dout: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
        rows, flat = dout.reshape(-1, dout.shape[-1]), indices.reshape(-1)
        return flat, rows if padding < 0 else torch.where((flat == padding)[:, None], 0, rows)

    insert_call(total, ADD_ROWS, table, 0, *insert_formula(total, formula, dout, indices))
    return True
