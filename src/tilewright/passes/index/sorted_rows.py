"""Sorts of indices, gathers in the order of one, and sums and maxima of rows by an index, which is sorted once for all.

    values, order = sort(view(topk(p, k)[1]))       int64, below p's last size, 8
    →
    narrow, order = sort(to_copy(view(topk(p, k)[1]), int8)); values = to_copy(narrow, int64)

A mixture of experts orders its tokens so, and a radix sort's passes are proportional to a key's bits: 4096 keys of 64
took 33 µs on an H200, in one block. The gradient of a gather by a permutation is a gather by the inverse:

    p = sort(x)[1]; q = index_put(empty, [p], arange(n))                     q[p[i]] = i

    dx = index_put(zeros(n, …), [p], dy, accumulate)            →   dx = index(dy, [q])
    dx = index_put(zeros(n, …), [q], dy, accumulate)            →   dx = index(dy, [p])
    dx = index_put(zeros(n / k, …), [p // k], dy, accumulate)   →   dx = sum(view(index(dy, [q]), [n / k, k, …]), 1)

PyTorch accumulates by sorting the indices again, in some 25 launches: 280 of 2,000 µs of Mixtral's training step with
two layers. Rows by an index (`Orders`), with keys, order = sort(i), in the last line sort(j):

    index_add(zeros, 0, i, dy)                                     →  embedding_sums(dy, keys, order, n)
    index_add(zeros, 0, i, x[j])                                   →  embedding_sums(x, keys, j[order], n)
    scatter_reduce(zeros, 0, i, x[j], "amax")                      →  row_extremes(x, keys, j[order], n, …)
    index_add(zeros, 0, i, x[j] == top[i])                         →  matching_sums(x, top, None, keys, j[order])
    index_add(zeros, 0, j, (x[j] == top[i]) * dy[i])               →  matching_sums(top, x, dy, keys, i[order])

The second never writes x[j], the rows of a graph's edges: it reads those of the nodes, which stay in the cache. The
last two lines are PyTorch's gradient of the third.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_again, insert_call, insert_results, insert_value
from tilewright.graph.specialise import has_symbols
from tilewright.kernels.device import DTYPES
from tilewright.passes.rule import NOTHING, Match, Value, call, gpu, matches, rule
from tilewright.passes.units import behind_views, stored
from tilewright.passes.zeros import is_zeros

aten: Any = torch.ops.aten
CHOSEN = call(operator.getitem, call(aten.topk.default, "source", ..., dim=Value("dim", (int,))), 1)
KEYS = (torch.int8, torch.int16, torch.int32)
MOST = 2**15
"""Extent up to which keys are narrowed: those of 32 bits cost a conversion and save little."""


def _narrow(node: fx.Node, keys: fx.Node) -> dict[str, torch.dtype] | None:
    """The narrowest dtype that holds every key; None if their range is unknown, or they are not int64."""
    extent = _extent(stored(keys))
    if calls.tensor(keys).dtype != torch.int64 or extent is None or extent > MOST:
        return None
    return {"dtype": narrowest(extent)}


def narrowest(extent: int) -> torch.dtype:
    """The narrowest dtype of keys in [0, extent)."""
    return next((dtype for dtype in KEYS if extent - 1 <= torch.iinfo(dtype).max), torch.int64)


def _extent(node: fx.Node) -> int | None:
    """The number of elements from which `topk` chose these indices; None for any other value."""
    found = next(matches(CHOSEN, node), None)
    value = None if found is None else calls.tensor(found["source"])
    extent = value.shape[found["dim"]] if value is not None and found is not None and value.dim() else None
    return extent if isinstance(extent, int) else None


def _reason(dtype: torch.dtype) -> str:
    info = torch.iinfo(dtype)
    return f"its keys are at most {info.max}: {info.bits} bits of them are sorted, and not 64"


@rule(call((aten.sort.default, aten.sort.stable), ..., self="keys"), on=gpu, where=_narrow, reason=_reason)
def narrow_sorts(node: fx.Node, keys: fx.Node, dtype: torch.dtype) -> list[fx.Node]:
    narrow = insert_call(node, aten._to_copy.default, keys, dtype=dtype)
    return insert_results(node, insert_again(node, node, narrow), 2)


TIMES = Value("times", (int,))
DIVIDED = (
    call(aten.floor_divide.default, "index", TIMES),
    call(aten.div.Tensor_mode, "index", TIMES, rounding_mode=lambda mode: mode in ("floor", "trunc")),
)
ORDER = call(operator.getitem, call((aten.sort.default, aten.sort.stable), ...), 1)
EXTENT = Value("extent", (int,))
COUNTED = (
    call(aten.arange.default, EXTENT, ...),
    call(aten.arange.start, 0, EXTENT, ...),
    call(aten.arange.start_step, 0, EXTENT, lambda step: step == 1, ...),
)
INVERTED = call(aten.index_put.default, "into", ["index"], COUNTED)


def _permuted(into: fx.Node, index: fx.Node, rows: fx.Node) -> dict[str, Any] | None:
    """q and k so that the gradient's row i is Σ rows[q[i · k + j]] over j < k; None if there is no permutation."""
    values = [calls.tensor(one) for one in (into, rows, index)]
    if not is_zeros(into) or any(map(has_symbols, values)):
        return None
    shape, given, places = (tuple(x.shape) for x in values)
    order, times = _divided(index)
    if len(places) != 1 or given != (places[0], *shape[1:]) or places != (shape[0] * times,):
        return None
    inverse = _inverse(order)
    return None if inverse is None else {"inverse": inverse, "times": times, "producer": behind_views(rows)}


@rule(
    call(aten.index_put.default, "into", ["index"], "rows", lambda accumulate: accumulate),
    where=_permuted,
    reason="its indices are a permutation: the gradient is gathered by the inverse",
    by="permutations",
)
def gather_back(node: fx.Node, rows: fx.Node, inverse: fx.Node, times: int) -> fx.Node:
    new = insert_call(node, aten.index.Tensor, rows, [inverse])
    if times == 1:
        return new
    groups = insert_call(node, aten.view.default, new, [-1, times, *calls.tensor(new).shape[1:]])
    return insert_call(node, aten.sum.dim_IntList, groups, [1])


def _inverse(node: fx.Node) -> fx.Node | None:
    """q with q[p[i]] = i for a permutation p, inserted if it is missing; None if `node` is not known to be one."""
    permuted = _inverted(node)
    if permuted is not None and _orders(permuted):
        return permuted
    if not _orders(node):
        return None
    if (known := next((user for user in node.users if _inverted(user) is node), None)) is not None:
        return known
    value = calls.tensor(node)
    options: dict[str, Any] = {"dtype": torch.int64, "device": value.device, "pin_memory": False}
    numbers = insert_call(node.next, aten.arange.default, value.shape[0], **options)
    return insert_call(numbers.next, aten.index_put.default, node, [node], numbers)


def _divided(index: fx.Node) -> tuple[fx.Node, int]:
    """p and k if `index` is `p // k` with k > 0, else `index` and 1."""
    whole: Match = {"index": index, "times": 1}
    found = next((m for m in matches(DIVIDED, index) if m["times"] > 0), whole)
    return found["index"], found["times"]


def _orders(node: fx.Node) -> bool:
    """Whether this is the order that sorts a vector: a permutation."""
    return any(calls.tensor(node).dim() == 1 for _ in matches(ORDER, node))


def _inverted(node: fx.Node) -> fx.Node | None:
    """p if `node` is `index_put(…, [p], arange(n))` into n elements, else None."""
    for found in matches(INVERTED, node):
        value, index = calls.tensor(node), found["index"]
        if not has_symbols(value) and value.shape == calls.tensor(index).shape == (found["extent"],):
            return index  # type: ignore[no-any-return]
    return None


@dataclass(frozen=True)
class Rows:
    """`table`[index], or `table` itself where `index` is None; `table` is [rows, *]."""

    table: fx.Node
    index: fx.Node | None


@dataclass(frozen=True)
class RowTarget:
    """Each position's row is reduced into row `index[position]` of a result of shape `shape`."""

    index: fx.Node
    shape: tuple[int, ...]
    wraps: bool
    """Whether a negative index counts from the end."""

    @property
    def extent(self) -> int:
        return self.shape[0]


class Orders:
    """The sorted indices of a graph: keys, order and bounds, sorted once for each index and extent."""

    def __init__(self) -> None:
        self._sorted: dict[tuple[fx.Node, int], list[fx.Node]] = {}
        self._taken: dict[tuple[fx.Node, fx.Node], fx.Node] = {}

    def sums(self, before: fx.Node, values: fx.Node, to: RowTarget) -> fx.Node:
        """Inserts the sums of rows of `values` in front of the call that they replace."""
        keys, order, bounds = self._sort(before, to)
        if (match := _matching(values, to)) is not None:
            where = self._rows(before, match.other, order)
            summed = [] if match.summed is None else [match.summed]

            def compared(keys: Tensor, where: Tensor, bounds: Tensor, *tables: Tensor) -> Tensor:
                other, own, *rows = (x.reshape(x.shape[0], -1) for x in tables)
                given = rows[0] if rows else None
                total: Tensor = torch.ops.tilewright.matching_sums(other, own, given, keys, where, bounds)
                return total.view(to.shape)

            return insert_value(before, compared, keys, where, bounds, match.other.table, match.own, *summed)
        return self._reduced(before, values, to, "embedding_sums", -1)

    def extremes(
        self, before: fx.Node, values: fx.Node, to: RowTarget, start: float, *, largest: bool, include: bool
    ) -> fx.Node:
        """The largest or smallest of the rows, with `include` also of `start`; `start` where there are no rows."""
        return self._reduced(before, values, to, "row_extremes", largest, start, include)

    def _reduced(self, before: fx.Node, values: fx.Node, to: RowTarget, operator: str, *options: Any) -> fx.Node:
        keys, order, bounds = self._sort(before, to)
        rows_of = taken(values) or Rows(values, None)
        where = self._rows(before, rows_of, order)

        def formula(values: Tensor, keys: Tensor, order: Tensor, bounds: Tensor) -> Tensor:
            rows, reduce = values.reshape(-1, prod(to.shape[1:])), getattr(torch.ops.tilewright, operator)
            result: Tensor = reduce(rows, keys, order, bounds, to.extent, *options)
            return result.view(to.shape)

        return insert_value(before, formula, rows_of.table, keys, where, bounds)

    def counts(self, before: fx.Node, to: RowTarget, dtype: torch.dtype) -> fx.Node:
        """The number of rows that each row of the result gets, in every column."""
        *_, bounds = self._sort(before, to)

        def formula(bounds: Tensor) -> Tensor:
            count = (bounds[1:] - bounds[:-1]).to(dtype).view(-1, *[1] * (len(to.shape) - 1))
            return count.expand(to.shape).clone(memory_format=torch.contiguous_format)

        return insert_value(before, formula, bounds)

    def averaged(self, before: fx.Node, total: fx.Node, to: RowTarget, *, include: bool) -> fx.Node:
        """Sums divided by their number of rows, with `include` by one more; a sum of no rows stays 0."""
        *_, bounds = self._sort(before, to)

        def formula(total: Tensor, bounds: Tensor) -> Tensor:
            count = (bounds[1:] - bounds[:-1] + int(include)).clamp(min=1).float()
            return (total.float() / count.view(-1, *[1] * (len(to.shape) - 1))).to(total.dtype)

        return insert_value(before, formula, total, bounds)

    def _sort(self, before: fx.Node, to: RowTarget) -> list[fx.Node]:
        if (known := self._sorted.get((to.index, to.extent))) is None:
            keys = insert_value(before, lambda index: _keys(index, to), to.index)
            known = self._sorted[to.index, to.extent] = sort_keys(before, keys, to.extent)
        return known

    def _rows(self, before: fx.Node, rows: Rows, order: fx.Node) -> fx.Node:
        """The row of the table for each sorted position; an index out of bounds stops the device."""
        if rows.index is None:
            return order
        if (known := self._taken.get((rows.index, order))) is None:
            count = rows.table.meta["val"].shape[0]

            def formula(index: Tensor, order: Tensor) -> Tensor:
                every = torch.arange(count, device=index.device)
                return aten.index.Tensor(every, [aten.index.Tensor(index, [order])])  # type: ignore[no-any-return]

            known = self._taken[rows.index, order] = insert_value(before, formula, rows.index, order)
        return known


def sort_keys(before: fx.Node, keys: fx.Node, entries: Any) -> list[fx.Node]:
    """Inserts the stable sort of a vector of keys in [0, entries): the keys, their order and bounds."""
    from tilewright.kernels import segment_reduce as _defines_the_operators  # noqa: F401

    ranked = insert_call(before, aten.sort.stable, keys, stable=True)
    parts = insert_results(before, ranked, 2)
    return [*parts, insert_call(before, torch.ops.tilewright.sorted_bounds.default, parts[0], entries)]


TAKEN = (
    call(aten.index.Tensor, "table", ["index"]),
    call(aten.index_select.default, "table", 0, "index"),
    call(aten.gather.default, "table", 0, "repeated", ...),
)


def taken(values: fx.Node) -> Rows | None:
    """`values` as rows that a dense index takes from a dense table; None if they are not."""
    found = next(matches(TAKEN, behind_views(values)), NOTHING)
    index, repeated = found.get("index"), found.get("repeated")
    if repeated is not None and calls.tensor(repeated).shape[1:] == calls.tensor(found["table"]).shape[1:]:
        index = row_index(repeated)
    if index is None:
        return None
    table, places, value = (calls.tensor(x) for x in (found["table"], index, values))
    is_index = places.dtype in (torch.int64, torch.int32) and places.dim() == 1 and places.is_contiguous()
    is_dense = table.dim() > 1 and table.is_contiguous() and value.is_contiguous()
    return Rows(found["table"], index) if is_index and is_dense and value.shape[:1] == places.shape else None


def row_index(index: fx.Node) -> fx.Node | None:
    """The index of one element per row that `index` repeats along its other dimensions; None if it does not."""
    base = stored(index)
    given, whole = calls.tensor(index), calls.tensor(base)
    if not given.dim() or not whole.is_contiguous() or whole.numel() != given.shape[0]:
        return None
    steps = [stride for stride, size in zip(given.stride(), given.shape, strict=True) if size > 1 and stride]
    return base if (steps == [1] and given.stride(0) == 1) or given.shape[0] == 1 else None


@dataclass(frozen=True)
class _Match:
    """Rows `other` are compared with the result's rows `own`; where equal, rows of `summed` are added (None: ones)."""

    other: Rows
    own: fx.Node
    summed: fx.Node | None


SEEN = frozenset({"view", "expand", "unsqueeze"})
EQUAL = call(aten.eq.Tensor, "own", "other", through=SEEN), call(aten.eq.Tensor, "other", "own", through=SEEN)
COMPARED = call(aten._to_copy.default, EQUAL, ...), call(aten.mul.Tensor, EQUAL, "summed")


def _matching(values: fx.Node, to: RowTarget) -> _Match | None:
    value = calls.tensor(values)
    for found in matches(COMPARED, behind_views(values)):
        own, other = found["own"], found["other"]
        mine, theirs = taken(own), taken(other) or Rows(other, None)
        summed = taken(found["summed"]) if "summed" in found else theirs
        if mine is None or summed is None or mine.index is not to.index or value.dtype not in DTYPES:
            continue
        compared, *tables = (calls.tensor(x) for x in (other, mine.table, theirs.table, summed.table))
        alike = compared.shape == value.shape and compared.is_contiguous() and tuple(tables[0].shape) == to.shape
        alike = alike and {table.dtype for table in tables} == {value.dtype} and tables[1].shape == tables[2].shape
        if alike and summed.index is theirs.index:
            return _Match(theirs, mine.table, summed.table if "summed" in found else None)
    return None


def _keys(index: Tensor, to: RowTarget) -> Tensor:
    """Narrow keys: a radix sort's passes are proportional to their bits. An index out of bounds stays out of bounds."""
    index = torch.where(index < 0, index + to.extent, index) if to.wraps else index
    return index.clamp(-1, to.extent).to(narrowest(to.extent + 1)).view(-1)
