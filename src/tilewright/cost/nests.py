"""The cost of a region: its loop nest's accesses, and the arithmetic of the operators inside it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import sympy

from tilewright.cost.symbols import total
from tilewright.graph.dims import SymbolicShapes
from tilewright.loops.lower import Lowered
from tilewright.loops.nest import Buffer
from tilewright.records.program import Cost

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Node

NBYTES = {
    "float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2, "int16": 2,
    "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


def nest_cost(lowered: Lowered, members: Iterable[Cost], symbolic: SymbolicShapes) -> Cost:
    """What the kernel of a region moves (each buffer's elements once) and computes (what its members do)."""
    nest = lowered.nest
    work = total(members)
    return Cost(
        reads=sum(b.elements for b in nest.inputs),
        writes=sum(b.elements for b in nest.outputs),
        bytes_read=_nbytes(nest.inputs),
        bytes_written=_nbytes(nest.outputs),
        flops=work.flops,
        transcendentals=work.transcendentals,
        reads_symbolic=_formula(lowered.inputs, nest.inputs, symbolic),
        writes_symbolic=_formula(lowered.outputs, nest.outputs, symbolic),
        flops_symbolic=work.flops_symbolic,
        provenance=work.provenance,
    )


def _nbytes(buffers: Sequence[Buffer]) -> int:
    return sum(b.elements * NBYTES[b.dtype] for b in buffers)


def _formula(nodes: Sequence[Node], buffers: Sequence[Buffer], symbolic: SymbolicShapes) -> str | None:
    """The elements of all buffers in the case's dimensions; None where a shape has no formula."""
    terms: list[sympy.Expr] = []
    for node, buffer in zip(nodes, buffers, strict=True):
        shape = symbolic.of_outputs(node)[0]
        if shape is None:
            return None
        value: Tensor = node.meta["val"]
        elements = sympy.Mul(*(n for n, stride in zip(shape, value.stride(), strict=True) if stride))
        if symbolic.number(elements) != buffer.elements:
            return None
        terms.append(elements)
    return str(sympy.expand(sympy.Add(*terms)))
