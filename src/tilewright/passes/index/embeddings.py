"""Gradients of embeddings: added in place to that of an output layer, and several as one sum. Figures: an H200.

    dw = add(slice(mm(…)), embedding_sums(dy, …))   →   add_embedding_sums_(slice(mm(…)), dy, …)
    dw = add(slice(mm(…)), embedding_dense_backward(dy, indices, …))   →   index_add_(slice(mm(…)), 0, indices, dy)

In the backward graph, for a table that is also the weight of the output layer: only the rows that were looked up are
read and written again (DeBERTa, 128,100 × 768 in bf16: 49 µs for the sums, 138 for the addition that it saves). The
second is for a CPU (30,522 × 128 in fp32, 128 positions: 0.1 ms; the zeros and the addition took 17).

    dw[t] = embedding_dense_backward(select(dy, 1, t), i[t], n[t], …)      for several tables t
    →
    keys, order = sort(view(stack(i) + begin)); dw = embedding_sums(view(dy), keys, order, …)
    dw[t] = slice(dw, 0, begin[t], begin[t] + n[t])

Embeddings that look up as many rows of the same width: recommenders have tens of tables, the sort of each takes 17
launches, and a longer one hardly more. Gradients of rows are read where they lie if they are neighbours in one tensor,
as those of a stack or a concatenation are; else they are stacked. Keys of neighbours without an embedding and of
padding come last and are not summed. Each gradient has the same bits as a sum of its own. Those that another operator
reads stay: they may be added to a product in place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.graph import calls
from tilewright.graph.calls import readers
from tilewright.graph.insert import insert_call, insert_formula
from tilewright.graph.insert import replace as replace_node
from tilewright.graph.specialise import has_symbols
from tilewright.graph.views import maker
from tilewright.hardware.target import Target
from tilewright.kernels.device import NARROW
from tilewright.passes.index.sorted_rows import narrowest, sort_keys
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


ROWS = 64
"""A table begins at a multiple of this many rows of the result, and so at a multiple of 128 bytes."""


@dataclass(frozen=True)
class _Slot:
    """The rows x[…, number, …] of a dense x, whose dimension `dim` has `slots` of them."""

    x: fx.Node
    dim: int
    slots: int
    number: int


@dataclass(frozen=True)
class Group:
    """Gradients of tables that can be one sum, which no operator reads; in the order of their rows."""

    gradients: Sequence[fx.Node]
    last: fx.Node
    """The last of them in the graph."""
    first: _Slot | None
    """The slot of the first if their rows are neighbours in one tensor."""

    @property
    def positions(self) -> int:
        """Of each table."""
        return prod(calls.tensor(self.gradients[0].args[0]).shape[:-1])

    @property
    def stacked_bytes(self) -> int:
        """Bytes of rows that are stacked first."""
        rows = self.gradients[0].all_input_nodes[0]
        return 0 if self.first else len(self.gradients) * calls.nbytes(rows)

    def apply(self) -> fx.Node:
        """Insert the sum; the first gradient's part of it."""
        parts = _apply(self.gradients, self.first, self.last)
        for node, part in zip(self.gradients, parts, strict=True):
            replace_node(node, part)
        return parts[0]


def groups_of(gradients: Sequence[fx.Node]) -> Iterator[Group]:
    """Those of these calls of `embedding_dense_backward` that can be one sum."""
    groups: dict[tuple[Any, ...], list[fx.Node]] = {}
    for node in gradients:
        given, places = calls.tensor(node.args[0]), calls.tensor(node.args[1])
        known = isinstance(node.args[2], int) and not has_symbols(given) and not has_symbols(places)
        if known and places.dim() and all(user.op == "output" for user in node.users):
            groups.setdefault((given.dtype, given.shape, places.dtype, node.args[3]), []).append(node)
    for group in groups.values():
        entries = sum(-(-calls.number(node.args[2]) // ROWS) * ROWS for node in group)
        if len(group) > 1 and entries < 2**31:
            ordered, first = _neighbours(group)
            yield Group(ordered, group[-1], first)


def is_table(node: fx.Node) -> bool:
    """Whether this is one table's part of their sum, of which no two parts share an element."""
    sums = node.args[0] if node.target is aten.slice.Tensor else None
    if not isinstance(sums, fx.Node) or str(sums.target) != "tilewright.embedding_sums.default":
        return False
    entries, padding = map(calls.number, sums.args[-2:])
    return padding == entries - 1


def _apply(group: Sequence[fx.Node], first: _Slot | None, last: fx.Node) -> list[fx.Node]:
    """Insert the sum in front of `last`, which may be any of the group but comes after all others; its parts."""
    dout, padding = group[0].all_input_nodes[0], calls.number(group[0].args[3])
    given, count = calls.tensor(dout), len(group)
    entries = [calls.number(node.args[2]) for node in group]
    *begins, total = accumulate((-(-n // ROWS) * ROWS for n in entries), initial=0)
    dim, around = (first.dim, (first.number, first.slots - first.number - count)) if first else (0, (0, 0))
    behind = given.dim() - 1 - dim
    """Dimensions of the stacked indices behind that of the tables."""

    def keys_of(indices: Tensor) -> Tensor:
        table = torch.arange(count, device=indices.device).view(-1, *[1] * behind)
        # An index out of bounds stays out of bounds.
        inside = (indices >= 0) & (indices < _of_table(table, entries))
        keys = torch.where(inside, indices + _of_table(table, begins), -1)
        if padding >= 0:
            keys = torch.where(indices == padding, total, keys)
        if any(around):
            keys = aten.constant_pad_nd(keys, [0, 0] * behind + [*around], total)
        return keys.to(narrowest(total + 1)).reshape(-1)

    rows = first.x if first else insert_call(last, aten.stack.default, [node.args[0] for node in group], 0)
    rows = insert_call(last, aten.view.default, rows, [-1, given.shape[-1]])
    keys = insert_formula(last, keys_of, _stacked(last, [node.args[1] for node in group], dim))
    ranked = sort_keys(last, keys, total + 1)
    found = insert_call(last, torch.ops.tilewright.embedding_sums.default, rows, *ranked, total + 1, total)
    return [
        insert_call(last, aten.slice.Tensor, found, 0, begin, begin + n)
        for begin, n in zip(begins, entries, strict=True)
    ]


def _neighbours(group: list[fx.Node]) -> tuple[list[fx.Node], _Slot | None]:
    """The group in the order of its rows, and the slot of the first if they are neighbours."""
    slots = {node: slot for node in group if (slot := _slot(node)) is not None}
    ordered = sorted(slots, key=lambda node: slots[node].number)
    pairs = pairwise(slots[node] for node in ordered)
    if len(slots) < len(group) or any(replace(a, number=a.number + 1) != b for a, b in pairs):
        return group, None
    return ordered, slots[ordered[0]]


def _slot(gradient: fx.Node) -> _Slot | None:
    dout: Any = gradient.args[0]
    arguments: dict[str, Any] = calls.arguments(dout)
    width = calls.tensor(dout).shape[-1]
    if dout.target not in (aten.select.int, aten.slice.Tensor):
        return None
    x = arguments["self"]
    shape, dense = calls.tensor(x).shape, calls.tensor(x).is_contiguous()
    dim = arguments.get("dim", 0) % len(shape)
    if dout.target is aten.select.int:
        slots, number = shape[dim], arguments["index"] % shape[dim]
        return _Slot(x, dim, slots, number) if dense and dim < len(shape) - 1 else None
    start = arguments.get("start") or 0
    fits = start >= 0 and dim == len(shape) - 1 and arguments.get("step", 1) == 1
    if not (dense and fits) or shape[-1] % width or start % width:
        return None
    return _Slot(x, dim, shape[-1] // width, start // width)


def _stacked(before: fx.Node, parts: Sequence[Any], dim: int) -> fx.Node:
    """A stack; of neighbours along this dimension of a tensor, the part of it that they are."""
    given: list[dict[str, Any]] = [calls.arguments(part) for part in parts if part.target is aten.select.int]
    if len(given) == len(parts):
        x, start = given[0]["self"], given[0]["index"]
        same = all(one["self"] is x and one["dim"] % calls.tensor(x).dim() == dim for one in given)
        if same and start >= 0 and [one["index"] for one in given] == [*range(start, start + len(given))]:
            return insert_call(before, aten.slice.Tensor, x, dim, start, start + len(given))
    return insert_call(before, aten.stack.default, list(parts), dim)


def _of_table(table: Tensor, values: Sequence[int]) -> Tensor | int:
    """values[table], computed: a constant, a progression, or steps."""
    steps = [b - a for a, b in pairwise(values)]
    if len(set(steps)) == 1:
        return values[0] + table * steps[0] if steps[0] else values[0]
    return sum(((table > k) * step for k, step in enumerate(steps)), start=torch.full_like(table, values[0]))
