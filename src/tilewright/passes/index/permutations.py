"""The gradient of a gather by a permutation becomes a gather by the inverse permutation, without sums.

    p = sort(x)[1]; q = index_put(empty, [p], arange(n))                     q[p[i]] = i

    dx = index_put(zeros(n, …), [p], dy, accumulate)            →   dx = index(dy, [q])
    dx = index_put(zeros(n, …), [q], dy, accumulate)            →   dx = index(dy, [p])
    dx = index_put(zeros(n / k, …), [p // k], dy, accumulate)   →   dx = sum(view(index(dy, [q]), [n / k, k, …]), 1)

A mixture of experts gathers each token k times, in the order of the experts, and back in this way. PyTorch accumulates
by sorting the indices again, in some 25 launches: 280 of 2,000 µs of Mixtral's training step with two layers (H200).
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_call, insert_known
from tilewright.graph.specialise import has_symbols
from tilewright.passes.rule import Value, call, rule
from tilewright.passes.shared_zeros import is_zeros
from tilewright.passes.units import behind_views

aten: Any = torch.ops.aten
SORTS = (aten.sort.default, aten.sort.stable)


def _permuted(into: fx.Node, indices: Any, rows: fx.Node) -> dict[str, Any] | None:
    """q and k so that the gradient's row i is Σ rows[q[i · k + j]] over j < k; None if there is no permutation."""
    index = _only(indices)
    values = [calls.output(one) for one in (into, rows, index) if one is not None]
    if index is None or not is_zeros(into) or any(x is None or has_symbols(x) for x in values):
        return None
    shape, given, places = (tuple(x.shape) for x in values if x is not None)
    order, times = _divided(index)
    if len(places) != 1 or given != (places[0], *shape[1:]) or places != (shape[0] * times,):
        return None
    inverse = _inverse(order)
    return None if inverse is None else {"inverse": inverse, "times": times, "producer": behind_views(rows)}


@rule(
    call(aten.index_put.default, "into", Value("indices"), "rows", lambda accumulate: accumulate),
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


def _only(indices: Any) -> fx.Node | None:
    """The index if only the first axis is indexed, else None."""
    first, *rest = indices if isinstance(indices, Sequence) and indices else [None]
    return first if isinstance(first, fx.Node) and not any(rest) else None


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
    divides = index.target is aten.floor_divide.default or (
        index.target is aten.div.Tensor_mode and index.kwargs.get("rounding_mode") in ("floor", "trunc")
    )
    if divides and isinstance(index.args[0], fx.Node) and isinstance(index.args[1], int) and index.args[1] > 0:
        return index.args[0], index.args[1]
    return index, 1


def _orders(node: fx.Node) -> bool:
    """Whether this is the order that sorts a vector: a permutation."""
    if node.target is not operator.getitem or node.args[1] != 1:
        return False
    value = calls.output(node)
    return node.all_input_nodes[0].target in SORTS and value is not None and value.dim() == 1


def _inverted(node: fx.Node) -> fx.Node | None:
    """p if `node` is `index_put(…, [p], arange(n))` into n elements, else None."""
    if node.target is not aten.index_put.default or any(node.args[3:]):
        return None
    index, counted = _only(node.args[1]), node.args[2]
    value, places = calls.output(node), None if index is None else calls.output(index)
    if value is None or places is None or has_symbols(value) or value.shape != places.shape:
        return None
    return index if isinstance(counted, fx.Node) and _counts(counted, value.shape[0]) else None


def _counts(node: fx.Node, extent: int) -> bool:
    """Whether this is `arange(extent)`."""
    given = calls.arguments(node)
    named = node.target in (aten.arange.default, aten.arange.start, aten.arange.start_step)
    return named and (given.get("start", 0), given["end"], given.get("step", 1)) == (0, extent, 1)


def _insert_inverse(order: fx.Node) -> fx.Node:
    value: Any = calls.output(order)
    options: dict[str, Any] = {"dtype": torch.int64, "device": value.device, "pin_memory": False}
    with value.fake_mode:
        counted = aten.arange.default(value.shape[0], **options)
    numbers = insert_known(order.next, aten.arange.default, counted, value.shape[0], **options)
    return insert_call(numbers.next, aten.index_put.default, order, [order], numbers)
