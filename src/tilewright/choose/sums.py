"""On a GPU, tilewright's kernels compute sums at indices that may repeat: in shared memory, by sorted rows, or by
atomics.

    dx = index_put(zeros [n, m, …], [i, j], dy, accumulate)  →  dx = to_copy(index_sums(dy, i · m + j, n · m))
    dx = index_add(zeros, dim, i, dy)                        →  dx = to_copy(index_sums(dy, i, n))
    dx = scatter_add(zeros, dim, i, dy)                      →  dx = to_copy(index_sums(dy, i, n))
    dx = scatter_add(zeros, -1, i, dy)                       →  dx = scatter_sums(dy, i, n)
    dx = index_add(zeros, 0, i, dy)                          →  dx = embedding_sums(dy, *sort(i), n)
    dx = scatter_add(zeros, dim, i, dy), one index a row     →  dx = where(arange(n) == i, dy, 0)
    y  = scatter_reduce(zeros, 0, i, x, "amax" or "amin")    →  y  = row_extremes(x, *sort(i), n, …)
    y  = index_add(zeros, 0, i, ones)                        →  y  = differences of the sorted index's bounds

If the call adds to a tensor that is not zeros, that tensor is added to the sums. The fourth line is for results whose
rows fit shared memory; the fifth for many whole rows to many places, if the sort, shared by all sums at the index, is
predicted to cost less than atomics; the sixth is the gradient of a `gather` of one element per row, which the kernel of
its reader computes.

PyTorch sorts the indices of `index_put` in some 25 launches, and one warp adds the rows of one index after the other:
712 µs for the gradients of eight experts' biases, 4096 rows of 1024 and of 5632 in bf16 (H200). The other operators add
by atomics in the tensor's dtype, in a different order in each run: 267 µs for 96 × 512 × 512 in bf16 with the clamped
positions of an attention, where one read and one write take 26.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.choose.chooser import chosen
from tilewright.graph import calls
from tilewright.graph.insert import insert_formula, insert_value, replace
from tilewright.graph.specialise import has_symbols
from tilewright.hardware.target import Target
from tilewright.kernels.device import DTYPES
from tilewright.kernels.offer import Offer
from tilewright.passes.index.sorted_rows import Orders, RowTarget, row_index
from tilewright.passes.units import behind_views
from tilewright.passes.zeros import is_filled, is_zeros
from tilewright.records.errors import Refusal

aten: Any = torch.ops.aten
PUTS = (aten.index_put.default, aten._unsafe_index_put.default)
ADDS = (aten.index_add.default,)
SCATTERS = (aten.scatter_add.default, aten.scatter_reduce.two)
ADDED_ROWS, ADDED_ELEMENTS = 156e3, 300e3
"""Elements that atomics add per µs, in rows of no order and single (H200: 200,000 × 128 in 164 µs)."""
CONTENDED, MANY = 33e3, 16
"""The same for PyTorch's means and extremes with at least MANY rows per place: 16,000 × 192 to 512 places in 93 µs."""
COPIED = 3e6
"""Bytes of sorted rows that are summed per µs: estimated from other sizes."""
EXTREMES = ("amax", "amin")
JOINED: dict[str, Callable[..., Tensor]] = {"sum": torch.add, "amax": torch.maximum, "amin": torch.minimum}
"""The operator that combines the result with the tensor that the call adds to."""
SMALL = 2
"""A call that adds to values that are not zeros is rewritten if they are at most this many times the summed values."""
MARGIN = 1.2
"""A sort's predicted gain over atomics is at least this many times its cost: rows that come sorted need fewer atomics.
"""


@dataclass(frozen=True)
class _Sums:
    """A call that reduces `values` [outer, positions, columns] at `indices` into [outer, extent, columns]."""

    node: fx.Node
    values: fx.Node
    indices: tuple[fx.Node, ...]
    shape: tuple[int, ...]
    """The shape of the result."""
    start: int
    """The first dimension that is indexed."""
    by_element: bool = False
    """Whether there is an index for each element."""
    wraps: bool = False
    """Whether a negative index counts from the end."""
    reduce: str = "sum"
    """The reduction of the values: their sum, mean, or one of `EXTREMES`."""
    include: bool = True
    """Whether the reduction includes the tensor that the call adds to."""

    @property
    def dtype(self) -> torch.dtype:
        return calls.tensor(self.node).dtype

    @property
    def extent(self) -> int:
        return prod(self.shape[self.start : self.start + len(self.indices)])

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Outer, positions and columns."""
        found = [calls.output(index) for index in self.indices]
        shapes = [tuple(x.shape) for x in found if x is not None]
        positions = shapes[0][self.start] if self.by_element else prod(torch.broadcast_shapes(*shapes))
        return prod(self.shape[: self.start]), positions, prod(self.shape[self.start + len(self.indices) :])

    @property
    def picks(self) -> bool:
        """Whether one element of each row gets a value, at an index that a `gather` also reads."""
        gathered = any(user.target is aten.gather.default for user in self.indices[0].users)
        return self.by_element and self.sizes[1] == 1 and gathered

    @property
    def in_rows(self) -> bool:
        """Whether the rows fit the kernel in shared memory, whose result is the same in every run."""
        from tilewright.kernels.scatter_sums.cuda import MOST

        return self.by_element and self.start == len(self.shape) - 1 and self.extent <= MOST

    @property
    def rows_by(self) -> fx.Node | None:
        """The index with one element for each row of `values` if whole rows of a dense tensor are added, else None."""
        given, values = calls.tensor(self.indices[0]), calls.tensor(self.values)
        outer, positions, columns = self.sizes
        if outer != 1 or len(self.indices) != 1 or values.numel() != positions * columns:
            return None
        if not self.by_element:
            return self.indices[0] if given.is_contiguous() else None
        return row_index(self.indices[0])

    @property
    def counts(self) -> bool:
        """Whether the values are ones."""
        return self.reduce == "sum" and is_filled(behind_views(self.values), 1)

    @property
    def atomics_us(self) -> float:
        """Predicted time of atomics at places in no order; few places take one addition per tile."""
        from tilewright.kernels.index_sums.triton import FEW, WIDE

        _, positions, columns = self.sizes
        if self.reduce != "sum":
            return positions * columns / (CONTENDED if positions >= MANY * self.extent else ADDED_ROWS)
        rate = ADDED_ROWS if columns >= WIDE else ADDED_ELEMENTS
        return positions * columns / rate if self.extent > FEW else 0.0

    @property
    def sorted_us(self) -> float:
        """Predicted time of the sums of sorted rows, without the sort."""
        if self.counts:
            return 0.0
        _, positions, columns = self.sizes
        found = calls.tensor(self.values)
        return 12 + (positions + self.extent) * columns * found.element_size() / COPIED


class _SortPays:
    """Whether rows are sorted, which sums at the same index share."""

    def __init__(self, found: Sequence[_Sums]) -> None:
        self._by_index: dict[tuple[fx.Node, int], list[_Sums]] = {}
        for sums in found:
            if (index := sums.rows_by) is not None:
                self._by_index.setdefault((index, sums.extent), []).append(sums)

    def __call__(self, sums: _Sums) -> bool:
        """Whether sorted rows are predicted to be faster than atomics, or deterministic algorithms are enabled."""
        if (index := sums.rows_by) is None:
            return False
        if torch.are_deterministic_algorithms_enabled():
            return True
        positions = sums.sizes[1]
        gain = sum(other.atomics_us - other.sorted_us for other in self._by_index[index, sums.extent])
        return sums.atomics_us > sums.sorted_us and gain > MARGIN * (50 + positions / 4000)


def offers(graph: fx.Graph, target: Target) -> Iterator[Sequence[Offer]]:
    """For each call of a joint graph of ATen operators that reduces at indices, the ways to do so that are possible."""
    if target.language != "triton":
        return
    found = [node for node in graph.nodes if node.op == "call_function" and _accumulates(node)]
    matched = {node: _matched(node, _values(node)) for node in found}
    sort_pays, orders = _SortPays([sums for sums in matched.values() if isinstance(sums, _Sums)]), Orders()
    for node, sums in matched.items():
        yield [_offer(node, sums, sort_pays, orders)]


def _accumulates(node: fx.Node) -> bool:
    if node.target in PUTS:
        return bool(calls.arguments(node).get("accumulate"))
    if node.target is aten.scatter_reduce.two:
        return calls.arguments(node)["reduce"] in ("sum", "mean", *EXTREMES)
    return node.target in (*ADDS, *SCATTERS)


def _offer(node: fx.Node, sums: _Sums | Refusal, sort_pays: _SortPays, orders: Orders) -> Offer:
    name, values = calls.operator_name(node.target).partition(".")[0], _values(node)
    if isinstance(sums, _Sums) and sums.reduce != "sum" and not sort_pays(sums):
        sums = Refusal("a sort of its rows costs more than PyTorch's atomics")
    if isinstance(sums, Refusal):
        return Offer("tilewright.index_sums", name, node, lambda: node, str(sums), producer=values)
    # The matched values may have been another sum, which has been replaced since.
    how, write = _best(dataclasses.replace(sums, values=values), sort_pays, orders, is_zeros(node.args[0]))
    kernel = f"{sums.sizes[1]} positions added {how}"
    return Offer(kernel, name, node, lambda: _write(node, sums.reduce, write), producer=values)


def _best(sums: _Sums, sort_pays: _SortPays, orders: Orders, made_of_zeros: bool) -> tuple[str, Callable[[], fx.Node]]:
    """How the positions are reduced, and what inserts that: by the first way that is possible."""
    only_sorted = sums.reduce != "sum"
    if sums.picks and not only_sorted:
        return "where they are read", lambda: _insert(sums, _in_place)
    if sums.in_rows and not only_sorted:
        return "in rows that shared memory holds", lambda: _insert(sums, _by_rows)
    if sort_pays(sums):
        return "as rows sorted by index", lambda: _by_sort(sums, orders, made_of_zeros)
    dtype = sums.dtype if made_of_zeros else torch.float32
    return "by atomics in fp32", lambda: _insert(sums, partial(_by_atomics, dtype))


def _write(node: fx.Node, reduce: str, write: Callable[[], fx.Node]) -> fx.Node:
    """Let what `write` inserts, with the tensor that `node` adds to, take its place."""
    base, new = node.args[0], write()
    assert isinstance(base, fx.Node)
    made_of_zeros = is_zeros(base)
    if not made_of_zeros:
        new = insert_formula(node, lambda base, total: JOINED[reduce](base, total).to(base.dtype), base, new)
    replace(node, new)
    if made_of_zeros and not base.users:
        base.graph.erase_node(base)
    return new


def _values(node: fx.Node) -> fx.Node:
    given = calls.arguments(node)
    values = given["values" if node.target in PUTS else "source" if node.target in ADDS else "src"]
    assert isinstance(values, fx.Node)
    return values


def _matched(node: fx.Node, values: fx.Node) -> _Sums | Refusal:
    try:
        return _sums(node, values)
    except Refusal as refusal:
        return refusal


def _sums(node: fx.Node, values: fx.Node) -> _Sums:
    given, out, added = calls.arguments(node), calls.output(node), calls.output(values)
    assert out is not None and added is not None
    if out.dtype not in DTYPES:
        raise Refusal(f"its kernel is not for {out.dtype}")
    if has_symbols(out) or has_symbols(added):
        raise Refusal("its sizes are not known yet")
    if not is_zeros(node.args[0]) and added.numel() * SMALL < out.numel():
        raise Refusal("it adds few values to a large tensor that is not all zeros")
    sums = _put(node, values, given) if node.target in PUTS else _along_dim(node, values, given)
    indices = [calls.output(operand) for operand in sums.indices]
    if any(x is None or has_symbols(x) for x in indices):
        raise Refusal("its sizes are not known yet")
    if any(x is not None and not x.numel() for x in (out, added, *indices)):
        raise Refusal("a tensor is empty")
    if any(x is not None and x.dtype not in (torch.int64, torch.int32) for x in indices):
        raise Refusal("it selects by a mask, not by indices")
    if torch.are_deterministic_algorithms_enabled() and not (sums.picks or sums.in_rows or sums.rows_by):
        raise Refusal("deterministic algorithms are enabled")
    return sums


def _put(node: fx.Node, values: fx.Node, given: Any) -> _Sums:
    places = [place for place, index in enumerate(given["indices"]) if index is not None]
    if not places or places[-1] - places[0] + 1 != len(places):
        raise Refusal("it indexes dimensions that are not next to each other")
    indices = tuple(given["indices"][place] for place in places)
    return _Sums(node, values, indices, _shape(node), places[0], wraps=True)


def _along_dim(node: fx.Node, values: fx.Node, given: Any) -> _Sums:
    shape, index = _shape(node), given["index"]
    if not shape or calls.output(values).dim() != len(shape):  # type: ignore[union-attr]
        raise Refusal("it has no dimensions")
    dim = given["dim"] % len(shape)
    if node.target in ADDS:
        if given.get("alpha", 1) != 1:
            raise Refusal("the added values are scaled")
        return _Sums(node, values, (index,), shape, dim)
    include, reduce = bool(given.get("include_self", True)), given.get("reduce", "sum")
    if (reduce == "mean" or not include) and not (reduce != "sum" and is_zeros(node.args[0])):
        raise Refusal("elements that no index names must keep their old value")
    sent, places = _shape(values), _shape(index)
    if sent != places or (*sent[:dim], *sent[dim + 1 :]) != (*shape[:dim], *shape[dim + 1 :]):
        raise Refusal("the index does not cover all rows")
    sums = _Sums(node, values, (index,), shape, dim, by_element=True)
    if reduce == "sum":
        return sums
    if sums.rows_by is None:
        raise Refusal("a mean or maximum is taken of whole rows only")
    return dataclasses.replace(sums, reduce=reduce, include=include)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(calls.tensor(node).shape)


def _by_sort(sums: _Sums, orders: Orders, made_of_zeros: bool) -> fx.Node:
    index = sums.rows_by
    assert index is not None
    to = RowTarget(index, sums.shape, sums.wraps)
    if sums.counts:
        return orders.counts(sums.node, to, sums.dtype)
    if sums.reduce not in EXTREMES:
        total = orders.sums(sums.node, sums.values, to)
        return orders.averaged(sums.node, total, to, include=sums.include) if sums.reduce == "mean" else total
    largest = sums.reduce == "amax"
    start = 0.0 if made_of_zeros else -math.inf if largest else math.inf
    return orders.extremes(sums.node, sums.values, to, start, largest=largest, include=sums.include)


def _insert(sums: _Sums, formula: Callable[..., Tensor]) -> fx.Node:
    # They define the operators.
    import tilewright.kernels.index_sums
    import tilewright.kernels.scatter_sums  # noqa: F401

    return insert_value(sums.node, partial(formula, sums), sums.values, *sums.indices)


def _in_place(sums: _Sums, values: Tensor, index: Tensor) -> Tensor:
    columns = torch.arange(sums.extent, device=index.device)
    columns = columns.view(-1, *[1] * (len(sums.shape) - sums.start - 1))
    return torch.where(columns == index, values, 0)


def _by_rows(sums: _Sums, values: Tensor, index: Tensor) -> Tensor:
    total: Tensor = torch.ops.tilewright.scatter_sums(values, index, sums.extent)
    return total


def _by_atomics(dtype: torch.dtype, sums: _Sums, values: Tensor, *indices: Tensor) -> Tensor:
    """The sums, computed in fp32."""
    sizes, extent, shape = sums.sizes, sums.extent, sums.shape
    if sums.by_element:
        places = indices[0].reshape(sizes)
    else:
        found = torch.broadcast_tensors(*indices)
        ends = shape[sums.start : sums.start + len(found)]
        flat = found[0] if len(found) == 1 else _flat_index(found, ends)
        places = flat.reshape(1, -1, 1).expand(sizes)
        values = values.expand(*shape[: sums.start], *flat.shape, *shape[sums.start + len(found) :])
    wraps = sums.wraps and len(indices) == 1
    total: Tensor = torch.ops.tilewright.index_sums(values.reshape(sizes), places, extent, wraps)
    return total.view(shape).to(dtype)


def _flat_index(indices: Sequence[Tensor], extents: Sequence[int]) -> Tensor:
    """Indices into the flattened dimensions; an index out of bounds becomes the index after the last."""
    places = [torch.where(index < 0, index + n, index) for index, n in zip(indices, extents, strict=True)]
    flat, inside = places[0], (places[0] >= 0) & (places[0] < extents[0])
    for place, extent in zip(places[1:], extents[1:], strict=True):
        flat, inside = flat * extent + place, inside & (place >= 0) & (place < extent)
    return torch.where(inside, flat, prod(extents))


sum_by_index = chosen("index sums", offers)
