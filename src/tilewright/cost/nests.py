"""The cost of a region: its loop nest's accesses, and the arithmetic of the operators inside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import prod
from typing import TYPE_CHECKING

import sympy

from tilewright.cost.memory import storage
from tilewright.cost.symbols import total
from tilewright.graph import calls
from tilewright.graph.dims import SymbolicShapes
from tilewright.loops.lower import Lowered
from tilewright.loops.nest import Buffer
from tilewright.records.program import Cost

if TYPE_CHECKING:
    from torch.fx import Node

Moved = tuple["Node", int]
"""A tensor, and how many of its elements a kernel touches."""


def nest_cost(lowered: Lowered, members: Iterable[Cost], symbolic: SymbolicShapes) -> Cost:
    """The elements that a region's kernel moves, each once, and the operations of its members."""
    nest = lowered.nest
    work = total(members)
    read = list(_distinct(lowered.inputs, nest.inputs))
    written = list(_distinct(lowered.outputs, nest.outputs))
    return Cost(
        reads=sum(elements for _, elements in read),
        writes=sum(elements for _, elements in written),
        bytes_read=_nbytes(read),
        bytes_written=_nbytes(written),
        flops=work.flops,
        transcendentals=work.transcendentals,
        reads_symbolic=_formula(read, symbolic),
        writes_symbolic=_formula(written, symbolic),
        flops_symbolic=work.flops_symbolic,
        provenance=work.provenance,
    )


def nest_bytes(lowered: Lowered) -> tuple[int, int]:
    """Bytes that the kernel of a region reads and writes, each element once."""
    nest = lowered.nest
    return _nbytes(_distinct(lowered.inputs, nest.inputs)), _nbytes(_distinct(lowered.outputs, nest.outputs))


def _distinct(nodes: Sequence[Node], buffers: Sequence[Buffer]) -> Iterator[Moved]:
    """Each tensor with its accessed elements; views of one (x and its transpose) count at most its elements."""
    views: dict[Node, list[Moved]] = {}
    for node, buffer in zip(nodes, buffers, strict=True):
        views.setdefault(storage(node), []).append((node, buffer.elements))
    for whole, parts in views.items():
        tensor = calls.tensor(whole)
        elements = prod(n for n, stride in zip(calls.shape_of(tensor), calls.strides_of(tensor), strict=True) if stride)
        if sum(count for _, count in parts) > elements:
            yield whole, elements
        else:
            yield from parts


def _nbytes(moved: Iterable[Moved]) -> int:
    return sum(elements * calls.tensor(node).element_size() for node, elements in moved)


def _formula(moved: Iterable[Moved], symbolic: SymbolicShapes) -> str | None:
    """The elements of all tensors in the case's dimensions; None where a shape has no formula."""
    terms: list[sympy.Expr] = []
    for node, count in moved:
        shape = symbolic.of_outputs(node)[0]
        if shape is None:
            return None
        strides = calls.strides_of(calls.tensor(node))
        elements = sympy.Mul(*(n for n, stride in zip(shape, strides, strict=True) if stride))
        if symbolic.number(elements) != count:
            return None
        terms.append(elements)
    return str(sympy.expand(sympy.Add(*terms)))
