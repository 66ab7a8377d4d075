"""Sorts of indices, and gathers in the order of one, as a mixture of experts has them. Figures: an H200.

    values, order = sort(view(topk(p, k)[1]))       int64, below p's last size, 8
    →
    narrow, order = sort(to_copy(view(topk(p, k)[1]), int8)); values = to_copy(narrow, int64)

A radix sort's passes are proportional to a key's bits: 4096 keys of 64 took 33 µs, in one block.

    p = sort(x)[1]; q = index_put(empty, [p], arange(n))                     q[p[i]] = i

    dx = index_put(zeros(n, …), [p], dy, accumulate)            →   dx = index(dy, [q])
    dx = index_put(zeros(n, …), [q], dy, accumulate)            →   dx = index(dy, [p])
    dx = index_put(zeros(n / k, …), [p // k], dy, accumulate)   →   dx = sum(view(index(dy, [q]), [n / k, k, …]), 1)

The gradient of a gather by a permutation is a gather by the inverse. PyTorch accumulates by sorting the indices again,
in some 25 launches: 280 of 2,000 µs of Mixtral's training step with two layers.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_call, insert_results
from tilewright.graph.specialise import has_symbols
from tilewright.passes.rule import Match, Value, call, gpu, matches, rule
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
    target: Any = node.target
    return insert_results(node, insert_call(node, target, narrow, *node.args[1:], **node.kwargs), 2)


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
    return next((user for user in node.users if _inverted(user) is node), None) or _insert_inverse(node)


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


def _insert_inverse(order: fx.Node) -> fx.Node:
    value = calls.tensor(order)
    options: dict[str, Any] = {"dtype": torch.int64, "device": value.device, "pin_memory": False}
    numbers = insert_call(order.next, aten.arange.default, value.shape[0], **options)
    return insert_call(numbers.next, aten.index_put.default, order, [order], numbers)
