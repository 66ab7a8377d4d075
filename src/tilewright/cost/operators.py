"""The cost of one operator that PyTorch runs by itself, as one kernel launch.

By the definitions in the README: each distinct element of each operand is read once (a broadcast or
expanded operand has only its own elements), each element of each result is written once, and a result without a reader
is counted as unused. Views cost nothing. What tilewright's own operators move between several kernels counts, too.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING

import sympy

from tilewright.graph import calls
from tilewright.hardware.floor import floor_us
from tilewright.hardware.profiles import DeviceProfile
from tilewright.operators.arithmetic import NOTHING, Count, NoFormula, Shape, UnknownCost
from tilewright.operators.counting import arithmetic_of
from tilewright.operators.row import ALL, Row
from tilewright.operators.table import row_of
from tilewright.records.program import Cost

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Node

    from tilewright.graph.dims import SymbolicShapes

FREE = Cost(reads_symbolic="0", writes_symbolic="0", unused_symbolic="0", flops_symbolic="0")
UNKNOWN = Cost(provenance="unknown")
INERT = ("placeholder", "get_attr", "output")


@dataclass(frozen=True)
class Moved:
    """Elements of one tensor that a kernel moves, as a number and as a formula; bytes of one of them."""

    number: int
    formula: sympy.Expr
    itemsize: int

    @property
    def nbytes(self) -> int:
        return self.number * self.itemsize


class NodeSizes:
    """One operator call, its shapes as numbers (`symbolic` None) or as formulas."""

    def __init__(self, node: Node, symbolic: SymbolicShapes | None) -> None:
        self._node = node
        self._symbolic = symbolic
        self._arguments = calls.arguments(node)
        self._operands = [operand for _, operand in _operands(node)]

    def _shapes(self, node: Node) -> Sequence[Shape | None]:
        if self._symbolic is not None:
            return self._symbolic.of_outputs(node)
        return [None if tensor is None else calls.shape_of(tensor) for tensor in calls.outputs(node)]

    def argument(self, name: str) -> object:
        return self._arguments.get(name)

    def shape(self, name: str) -> Shape | None:
        argument = self._arguments.get(name)
        return next((self._shapes(node)[0] for node in self._operands if node is argument), None)

    def operand(self, index: int = 0) -> Shape:
        return self._shapes(self._operands[index])[0] or ()

    def result(self, index: int = 0) -> Shape:
        return self._shapes(self._node)[index] or ()

    def number(self, count: Count) -> int:
        return int(count if self._symbolic is None else self._symbolic.number(count))

    def only_number(self, count: Count) -> int:
        if self._symbolic is not None:
            raise NoFormula
        return int(count)


def counted(node: Node) -> tuple[int, int]:
    """FLOPs and transcendentals of one call, numbers alone; nothing where they are not known."""
    row = row_of(node.target)
    arithmetic = None if row is None else arithmetic_of(row)
    if row is None or arithmetic is None or not _is_plain(node, row):
        return 0, 0
    sizes = NodeSizes(node, None)
    try:
        return int(arithmetic.flops(sizes)), int(arithmetic.transcendentals(sizes))
    except UnknownCost:
        return 0, 0


def operator_cost(node: Node, symbolic: SymbolicShapes) -> Cost:
    """The cost of one node of a captured graph; `symbolic` holds the shapes of all of them.

    Inputs, views and `getitem` are free. Provenance is "unknown", and every count 0, for an operator
    without a rule, for sparse tensors, for arithmetic of complex ones, and for attention over packed
    sequences. A formula that does not give the numeric count at the case's sizes is left out, and so is
    that of the FLOPs of attention in a window. Raises `CaptureError` for data-dependent sizes.
    """
    if node.op in INERT or node.target is operator.getitem or calls.is_view(node):
        return FREE
    row = row_of(node.target)
    arithmetic = None if row is None else arithmetic_of(row)
    if row is None or arithmetic is None or not _is_plain(node, row):
        return UNKNOWN
    numbers, formulas = NodeSizes(node, None), NodeSizes(node, symbolic)
    try:
        flops = int(arithmetic.flops(numbers))
    except UnknownCost:
        return UNKNOWN
    reads = list(_reads(node, row, numbers, formulas, symbolic))
    used, unused = _writes(node, row, numbers, formulas, symbolic)
    if between := row.traffic.between:
        for moved, elements in zip((reads, used), between, strict=True):
            moved.append(Moved(int(elements(numbers)), sympy.sympify(elements(formulas)), reads[0].itemsize))

    def formula(expression: Count, number: int) -> str | None:
        # Shapes that two rules name differently could disagree; a wrong formula is worse than none.
        return str(sympy.expand(expression)) if symbolic.number(expression) == number else None

    def count(moved: list[Moved]) -> tuple[int, str | None]:
        number = sum(m.number for m in moved)
        return number, formula(sympy.Add(*(m.formula for m in moved)), number)

    (read, read_formula), (written, written_formula) = count(reads), count(used)
    wasted, wasted_formula = count(unused)
    try:
        flops_formula = formula(arithmetic.flops(formulas), flops)
    except NoFormula:
        flops_formula = None
    return Cost(
        reads=read,
        writes=written,
        unused=wasted,
        bytes_read=sum(m.nbytes for m in reads),
        bytes_written=sum(m.nbytes for m in used + unused),
        flops=flops,
        transcendentals=int(arithmetic.transcendentals(numbers)),
        reads_symbolic=read_formula,
        writes_symbolic=written_formula,
        unused_symbolic=wasted_formula,
        flops_symbolic=flops_formula,
    )


def scratch_bytes(node: Node) -> int:
    """Bytes of scratch memory that a call needs beside its results."""
    row = row_of(node.target)
    if row is None or row.traffic.scratch is None:
        return 0
    first = next(calls.output(operand) for _, operand in _operands(node))
    assert first is not None
    return int(row.traffic.scratch(NodeSizes(node, None), first.element_size()))


def _operands(node: Node) -> Iterator[tuple[str, Node]]:
    """Every tensor operand with the name of its argument, as often as it is passed."""
    import torch

    for name, argument in calls.arguments(node).items():
        for value in argument if isinstance(argument, list | tuple) else (argument,):
            if isinstance(value, torch.fx.Node) and calls.output(value) is not None:
                yield name, value


def _is_plain(node: Node, row: Row) -> bool:
    import torch

    tensors = [*map(calls.output, node.all_input_nodes), *calls.outputs(node)]
    is_complex_known = row.counts_complex or row.arithmetic is NOTHING
    return all(t is None or (t.layout == torch.strided and (is_complex_known or not t.is_complex())) for t in tensors)


def _own(tensor: Tensor, shape: Shape) -> Moved:
    """The distinct elements of storage that a tensor addresses: along an expanded axis there is only one."""
    sizes, strides = calls.shape_of(tensor), calls.strides_of(tensor)
    axes = [i for i, size in enumerate(sizes) if size == 1 or strides[i] != 0]
    number = prod(sizes[i] for i in axes)
    formula = sympy.Mul(*(shape[i] for i in axes))
    reach = 1
    for stride, size in sorted((strides[i], sizes[i]) for i in axes if sizes[i] > 1):
        if stride < reach:
            # `unfold` gives windows that overlap: count at most the elements from the first to the last.
            number = min(number, 1 + sum((sizes[i] - 1) * strides[i] for i in axes))
            formula = sympy.Integer(number)
            break
        reach += (size - 1) * stride
    return Moved(number, formula, tensor.element_size())


def _reads(node: Node, row: Row, numbers: NodeSizes, formulas: NodeSizes, symbolic: SymbolicShapes) -> Iterator[Moved]:
    unread = row.traffic.unread
    by_storage: dict[Node, dict[Node, Moved]] = {}
    for argument, operand in _operands(node):
        if argument in unread or ALL in unread:
            continue
        moved = _own_of(operand, symbolic)
        places = row.traffic.gathered.get(argument)
        if places is not None and (count := int(places(numbers))) < moved.number:
            moved = Moved(count, sympy.sympify(places(formulas)), moved.itemsize)
        by_storage.setdefault(calls.through(operand, calls.is_view), {})[operand] = moved
    for storage, views in by_storage.items():
        whole = _own_of(storage, symbolic)
        # Two views of one tensor (x and its transpose) share elements, and each element is read once.
        if sum(moved.number for moved in views.values()) > whole.number:
            yield whole
        else:
            yield from views.values()


def _own_of(node: Node, symbolic: SymbolicShapes) -> Moved:
    return _own(calls.tensor(node), symbolic.of_outputs(node)[0] or ())


def _written_operands(node: Node) -> Iterator[Node]:
    written = {a.name for a in node.target._schema.arguments if a.alias_info and a.alias_info.is_write}  # type: ignore[union-attr]
    yield from (operand for name, operand in _operands(node) if name in written)


def _writes(
    node: Node, row: Row, numbers: NodeSizes, formulas: NodeSizes, symbolic: SymbolicShapes
) -> tuple[list[Moved], list[Moved]]:
    """The results that have a reader, and those that have none."""
    used: list[Moved] = []
    unused: list[Moved] = []
    if row.traffic.reserves:
        return used, unused
    if (elements := row.traffic.written) is not None and (result := calls.output(node)) is not None:
        return [Moved(int(elements(numbers)), sympy.sympify(elements(formulas)), result.element_size())], unused
    if calls.is_mutation(node) and not any(tensor is not None for tensor in calls.outputs(node)):
        return [_own_of(operand, symbolic) for operand in _written_operands(node)], unused
    if calls.has_many_outputs(node):
        taken = {user.args[1] for user in node.users if user.users}
    else:
        # A value written into an operand is used: the operand outlives the call.
        taken = {0} if node.users or calls.is_mutation(node) else set()
    for index, (tensor, shape) in enumerate(zip(calls.outputs(node), symbolic.of_outputs(node), strict=True)):
        if tensor is not None and shape is not None:
            (used if index in taken else unused).append(_own(tensor, shape))
    return used, unused


def floor_of(cost: Cost, dtype: str, kind: str, profile: DeviceProfile) -> tuple[float | None, str | None]:
    """The least time of one kernel in microseconds and its bound; None for both if its cost is unknown."""
    if cost.provenance == "unknown":
        return None, None
    return floor_us(
        cost.bytes, cost.flops, cost.transcendentals, dtype, cost.bytes, profile, kind, bytes_written=cost.bytes_written
    )
