"""Gradients of embeddings are added in place to that of an output layer. Figures: an H200.

    dw = add(slice(mm(…)), embedding_sums(dy, …))   →   add_embedding_sums_(slice(mm(…)), dy, …)
    dw = add(slice(mm(…)), embedding_dense_backward(dy, indices, …))   →   index_add_(slice(mm(…)), 0, indices, dy)

In the backward graph, for a table that is also the weight of the output layer: only the rows that were looked up are
read and written again (DeBERTa, 128,100 × 768 in bf16: 49 µs for the sums, 138 for the addition that it saves). The
second is for a CPU (30,522 × 128 in fp32, 128 positions: 0.1 ms; the zeros and the addition took 17).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from tilewright.graph import calls
from tilewright.graph.calls import readers
from tilewright.graph.insert import insert_call, insert_formula
from tilewright.graph.views import maker
from tilewright.hardware.target import Target
from tilewright.kernels.device import NARROW
from tilewright.passes.rule import call, cplusplus, rule

aten: Any = torch.ops.aten
GRADIENT, ADD_ROWS = aten.embedding_dense_backward.default, aten.index_add_.default
ADDED = ("tilewright.add_embedding_sums_.default", "aten.index_add_.default")


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


def is_table(node: fx.Node) -> bool:
    """Whether this is one table's part of their sum, of which no two parts share an element."""
    sums = node.args[0] if node.target is aten.slice.Tensor else None
    if not isinstance(sums, fx.Node) or str(sums.target) != "tilewright.embedding_sums.default":
        return False
    entries, padding = map(calls.number, sums.args[-2:])
    return padding == entries - 1
