"""Sums at indices that may repeat are tilewright's kernels on a GPU: rows in shared memory, or atomics in fp32.

    dx = index_put(zeros [n, m, …], [i, j], dy, accumulate)  →  dx = to_copy(index_sums(dy, i · m + j, n · m))
    dx = index_add(zeros, dim, i, dy)                        →  dx = to_copy(index_sums(dy, i, n))
    dx = scatter_add(zeros, dim, i, dy)                      →  dx = to_copy(index_sums(dy, i, n))
    dx = scatter_add(zeros, -1, i, dy)                       →  dx = scatter_sums(dy, i, n)

The last for rows of a result that shared memory holds.

PyTorch sorts the indices of `index_put` in some 25 launches, and one warp adds up each index after the other: 712 µs in
the mean for the gradients of eight experts' biases, 4096 rows of 1024 and of 5632 in bf16 (H200). Its others add by
atomics in the dtype of the tensor, in another order at every run: 267 µs for 96 × 512 × 512 in bf16 with the clamped
positions of an attention, and 22 for the zeros before, where one read and one write take 26.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_formula, replace
from tilewright.graph.source import source_line
from tilewright.graph.specialise import has_symbols
from tilewright.hardware.target import Target
from tilewright.kernels.device import DTYPES
from tilewright.passes.shared_zeros import is_zeros
from tilewright.passes.units import behind_views, gradients
from tilewright.records.program import Decision, GraphName

aten: Any = torch.ops.aten
PUTS = (aten.index_put.default, aten._unsafe_index_put.default)
ADDS = (aten.index_add.default,)
SCATTERS = (aten.scatter_add.default, aten.scatter_reduce.two)


class Refusal(Exception):
    """Why PyTorch's call stays."""


@dataclass(frozen=True)
class _Sums:
    """`index_sums` of `source` [outer, positions, columns] over `extent`, and where its operands come from."""

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
    def in_rows(self) -> bool:
        """Whether the sums are of rows that the kernel in shared memory takes, which is the same at every run."""
        from tilewright.kernels.scatter_sums.cuda import MOST

        return self.by_element and self.start == len(self.shape) - 1 and self.extent <= MOST


def sum_by_index(graph: fx.Graph, target: Target) -> list[Decision]:
    """Rewrite `graph`, a joint graph of ATen operators, in place; a decision for each call that adds at indices."""
    if target.language != "triton":
        return []
    found = [node for node in graph.nodes if node.op == "call_function" and _accumulates(node)]
    behind = gradients(graph) if found else set()
    return [_decide(node, "backward" if node in behind else "forward") for node in found]


def _accumulates(node: fx.Node) -> bool:
    if node.target in PUTS:
        return bool(calls.arguments(node).get("accumulate"))
    if node.target is aten.scatter_reduce.two:
        return calls.arguments(node)["reduce"] == "sum"
    return node.target in (*ADDS, *SCATTERS)


def _decide(node: fx.Node, side: GraphName) -> Decision:
    name, line = calls.operator_name(node.target).partition(".")[0], source_line(node)
    values = _values(node)
    producer = behind_views(values).name
    try:
        sums = _matched(node, values)
    except Refusal as refusal:
        reason = f"tilewright.index_sums does not take {name}: {refusal}"
        return Decision(side, producer, node.name, "refused", reason, source=line, passed_by="index sums")
    how = "in rows that shared memory holds" if sums.in_rows else "by atomics in fp32"
    reason = f"{sums.sizes[1]} positions are added {how}, in place of {name}"
    new = _apply(sums, _by_rows if sums.in_rows else _by_atomics)
    return Decision(side, producer, new.name, "taken", reason, source=line, passed_by="index sums")


def _values(node: fx.Node) -> fx.Node:
    given = calls.arguments(node)
    values = given["values" if node.target in PUTS else "source" if node.target in ADDS else "src"]
    assert isinstance(values, fx.Node)
    return values


def _matched(node: fx.Node, values: fx.Node) -> _Sums:
    given, out = calls.arguments(node), calls.output(node)
    assert out is not None
    if out.dtype not in DTYPES:
        raise Refusal(f"its kernel is not for {out.dtype}")
    if not is_zeros(node.args[0]):
        raise Refusal("it adds to values that are not zeros")
    sums = _put(node, values, given) if node.target in PUTS else _along(node, values, given)
    if torch.are_deterministic_algorithms_enabled() and not sums.in_rows:
        raise Refusal("the same bits are wanted in every run")
    known = [calls.output(operand) for operand in (node, values, *sums.indices)]
    if any(x is None or has_symbols(x) for x in known):
        raise Refusal("its sizes are not known yet")
    if any(x is not None and not x.numel() for x in known):
        raise Refusal("a tensor is empty")
    if any(x is not None and x.dtype not in (torch.int64, torch.int32) for x in known[2:]):
        raise Refusal("its indices are a mask")
    return sums


def _put(node: fx.Node, values: fx.Node, given: Any) -> _Sums:
    places = [place for place, index in enumerate(given["indices"]) if index is not None]
    if not places or places[-1] - places[0] + 1 != len(places):
        raise Refusal("the dimensions that are indexed are not neighbours")
    indices = tuple(given["indices"][place] for place in places)
    return _Sums(node, values, indices, _shape(node), places[0], wraps=True)


def _along(node: fx.Node, values: fx.Node, given: Any) -> _Sums:
    shape, index = _shape(node), given["index"]
    if not shape or calls.output(values).dim() != len(shape):  # type: ignore[union-attr]
        raise Refusal("it has no dimensions")
    dim = given["dim"] % len(shape)
    if node.target in ADDS:
        if given.get("alpha", 1) != 1:
            raise Refusal("what it adds is scaled")
        return _Sums(node, values, (index,), shape, dim)
    if not given.get("include_self", True):
        raise Refusal("it keeps what nothing is added to")
    sent, places = _shape(values), _shape(index)
    if sent != places or (*sent[:dim], *sent[dim + 1 :]) != (*shape[:dim], *shape[dim + 1 :]):
        raise Refusal("the index does not cover all rows")
    return _Sums(node, values, (index,), shape, dim, by_element=True)


def _shape(node: fx.Node) -> tuple[int, ...]:
    found = calls.output(node)
    assert found is not None
    return tuple(found.shape)


def _apply(sums: _Sums, formula: Callable[..., Tensor]) -> fx.Node:
    # They define the operators.
    import tilewright.kernels.index_sums
    import tilewright.kernels.scatter_sums  # noqa: F401

    node, zeros = sums.node, sums.node.args[0]
    new = insert_formula(node, lambda *given: formula(sums, *given), sums.values, *sums.indices)
    assert isinstance(zeros, fx.Node) and isinstance(new, fx.Node)
    replace(node, new)
    if not zeros.users:
        zeros.graph.erase_node(zeros)
    return new


def _by_rows(sums: _Sums, values: Tensor, index: Tensor) -> Tensor:
    total: Tensor = torch.ops.tilewright.scatter_sums(values, index, sums.extent)
    return total


def _by_atomics(sums: _Sums, values: Tensor, *indices: Tensor) -> Tensor:
    sizes, extent, shape = sums.sizes, sums.extent, sums.shape
    if sums.by_element:
        places = indices[0].reshape(sizes)
    else:
        found = torch.broadcast_tensors(*indices)
        ends = shape[sums.start : sums.start + len(found)]
        flat = found[0] if len(found) == 1 else _numbered(found, ends)
        places = flat.reshape(1, -1, 1).expand(sizes)
        values = values.expand(*shape[: sums.start], *flat.shape, *shape[sums.start + len(found) :])
    wraps = sums.wraps and len(indices) == 1
    total: Tensor = torch.ops.tilewright.index_sums(values.reshape(sizes), places, extent, wraps)
    return total.to(values.dtype).view(shape)


def _numbered(indices: Sequence[Tensor], extents: Sequence[int]) -> Tensor:
    """Places in the flattened dimensions; where an index is outside of its own, the place after the last."""
    places = [torch.where(index < 0, index + n, index) for index, n in zip(indices, extents, strict=True)]
    flat, inside = places[0], (places[0] >= 0) & (places[0] < extents[0])
    for place, extent in zip(places[1:], extents[1:], strict=True):
        flat, inside = flat * extent + place, inside & (place >= 0) & (place < extent)
    return torch.where(inside, flat, prod(extents))
