"""Symbolic shapes: every tensor of a captured graph in the named dimensions of its case.

    x[N, M] → max over M → [N] → unsqueeze → [N, 1] → x − · → [N, M]

Names travel through the operators from the inputs whose axes the case names, so two dimensions
stay two even where their sizes are equal. A parameter's axes get their names from what they meet.
Where no rule gives a name the number stands, and every expression has been checked to give the
captured size.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, cast

import sympy

from tilewright.graph import calls
from tilewright.graph.axis_names import AxisNames
from tilewright.operators.shapes import Axes, Axis, CallAxes, Result, pointwise
from tilewright.operators.table import row_of

if TYPE_CHECKING:
    from torch import Tensor
    from torch.fx import Graph, Node

Shape = tuple[sympy.Expr, ...]
Shapes = Shape | tuple[Shape | None, ...]
"""The shape of a node's tensor; of a node with several results, a tuple of shapes (None: no tensor)."""


class SymbolicShapes(dict["Node", Shapes]):
    """The symbolic shape of every node that gives tensors.

    `sizes` gives each named dimension its number, in the order in which the case names them, and
    `input_names` says which of them name an input's axis; `factors` keeps what each axis is a
    product of, major to minor (`B·S` is not `S·B`).
    """

    def __init__(self, graph: Graph, sizes: Mapping[str, int], input_names: Iterable[str]) -> None:
        super().__init__()
        self.graph = graph
        self.sizes = dict(sizes)
        self.input_names = frozenset(input_names)
        self.factors: dict[Node, Result] = {}
        self._numbers = {
            sympy.Symbol(name, positive=True, integer=True): sympy.Integer(size) for name, size in sizes.items()
        }

    def number(self, expression: sympy.Expr) -> sympy.Expr:
        """The expression at the case's sizes."""
        return sympy.sympify(expression).xreplace(self._numbers)

    def of_outputs(self, node: Node) -> tuple[Shape | None, ...]:
        """One shape per output, also for a node with a single one."""
        if node not in self:
            return tuple(None for _ in calls.outputs(node))
        shapes = self[node]
        return shapes if calls.has_many_outputs(node) else (shapes,)

    def of_result(self, value: object) -> tuple[tuple[int, ...], Axes] | None:
        """Sizes and factors of a node with one result; None of anything else."""
        factors = self.factors.get(cast("Node", value))
        if not isinstance(factors, tuple):
            return None
        return tuple(int(self.number(sympy.Mul(*axis))) for axis in factors), factors


def axis_text(expression: sympy.Expr) -> str:
    """An axis as people write it: `4·D`, `D/H`."""
    return str(expression).replace("**", "^").replace("*", "·")


def shape_text(shape: Shape) -> str:
    """A shape as people write it: `[B, S, 4·D]`."""
    return f"[{', '.join(map(axis_text, shape))}]"


def symbolic_shapes(
    graph: Graph,
    named_inputs: Mapping[str, tuple[str | None, ...]],
    sizes: Mapping[str, int],
    *,
    forward: SymbolicShapes | None = None,
) -> SymbolicShapes:
    """The symbolic shape of every node of `graph`.

    `named_inputs`: for a placeholder's name, the name of each of its axes (None: no name). `sizes`:
    every named dimension, also those of no input axis (heads). For a backward graph `forward` holds
    the shapes of the forward graph that its saved tensors and tangents come from. The result's
    symbols are sympy symbols, positive and integer.

    Raises `CaptureError` where a size depends on the data.
    """
    input_names = {name for axes in named_inputs.values() for name in axes if name}
    if forward is not None:
        sizes = forward.sizes | dict(sizes)
        input_names |= forward.input_names
    names = AxisNames(sizes, input_names)
    shapes = SymbolicShapes(graph, sizes, input_names)
    carried = dict(_carried(forward, graph)) if forward is not None else {}
    known: dict[Node, Result] = {}
    for node in graph.nodes:
        if node.op == "output" or not any(tensor is not None for tensor in calls.outputs(node)):
            continue
        if node in carried:
            known[node] = carried[node]
        elif node.op in ("placeholder", "get_attr"):
            known[node] = _input(node, names, named_inputs.get(node.name))
        else:
            known[node] = _checked(node, names, _apply(node, names, known))
    names.settle()
    for node, result in known.items():
        factors = _finished(node, names, result)
        shapes.factors[node] = factors
        shapes[node] = tuple(map(_shape, factors)) if isinstance(factors, list) else _shape(factors) or ()
    return shapes


def _input(node: Node, names: AxisNames, axis_names: tuple[str | None, ...] | None) -> Result:
    tensor = calls.outputs(node)[0]
    assert tensor is not None
    shape = calls.shape_of(tensor)
    if axis_names is None or len(axis_names) != len(shape):
        return names.parameter(shape)
    return tuple(_named(names, name, size) for name, size in zip(axis_names, shape, strict=True))


def _named(names: AxisNames, name: str | None, size: int) -> Axis:
    symbol = names.named.get(name or "")
    return names.unknown(size) if symbol is None or names.size(symbol) != size else (symbol,)


def _apply(node: Node, names: AxisNames, known: Mapping[Node, Result]) -> Result:
    call = _call(node, names, known)
    if node.target is operator.getitem:
        source = known.get(node.all_input_nodes[0])
        index = node.args[1]
        axes = source[index] if isinstance(source, list) and isinstance(index, int) else None
        return names.unknown_shape(call.shape) if axes is None else axes
    row = row_of(node.target)
    if row is None and any(tag.name == "pointwise" for tag in getattr(node.target, "tags", ())):
        return pointwise(call)
    if row is not None and row.shapes is not None:
        return row.shapes(call)
    unknown = [None if shape is None else names.unknown_shape(shape) for shape in call.shapes]
    return unknown if calls.has_many_outputs(node) else unknown[0] or ()


def _call(node: Node, names: AxisNames, known: Mapping[Node, Result]) -> CallAxes:
    """What a row's rule may ask about a node."""
    arguments, tensors = calls.arguments(node), calls.outputs(node)

    def axes_of(argument: object) -> Axes | None:
        found = known.get(cast("Node", argument))
        return found if isinstance(found, tuple) else None

    def dtype_of(name: str) -> str:
        tensor = calls.output(cast("Node", arguments[name]))
        assert tensor is not None
        return str(tensor.dtype).removeprefix("torch.")

    return CallAxes(
        names,
        arguments,
        axes_of,
        [axes for axes in map(axes_of, node.all_input_nodes) if axes is not None],
        len(tensors) if calls.has_many_outputs(node) else None,
        [None if tensor is None else calls.shape_of(tensor) for tensor in tensors],
        dtype_of,
    )


def _checked(node: Node, names: AxisNames, result: Result) -> Result:
    """The result with every axis that is not of the captured size replaced by one without a name."""

    def check(tensor: Tensor | None, axes: Axes | None) -> Axes | None:
        if tensor is None:
            return None
        shape = calls.shape_of(tensor)
        if axes is None or len(axes) != len(shape):
            return names.unknown_shape(shape)
        pairs = zip(axes, shape, strict=True)
        return tuple(axis if names.size_of(axis) == size else names.unknown(size) for axis, size in pairs)

    tensors = calls.outputs(node)
    if isinstance(result, tuple):
        return check(tensors[0], result) or ()
    # A rule may know fewer results than there are.
    padded = [*result, *[None] * len(tensors)]
    return [check(tensor, axes) for tensor, axes in zip(tensors, padded, strict=False)]


def _finished(node: Node, names: AxisNames, result: Result) -> Result:
    """The result in names and numbers only."""

    def finish(tensor: Tensor | None, axes: Axes | None) -> Axes | None:
        if tensor is None or axes is None:
            return None
        return tuple(map(names.finished, axes, calls.shape_of(tensor)))

    tensors = calls.outputs(node)
    if isinstance(result, tuple):
        return finish(tensors[0], result) or ()
    return [finish(tensor, axes) for tensor, axes in zip(tensors, result, strict=True)]


def _shape(axes: Axes | None) -> Shape | None:
    return None if axes is None else tuple(sympy.Mul(*axis) for axis in axes)


def _carried(forward: SymbolicShapes, backward: Graph) -> Iterator[tuple[Node, Axes]]:
    """The placeholders of a backward graph that are values of the forward graph, or gradients of its outputs.

    AOTAutograd gives a saved tensor the name it has in the forward graph, and passes the tangents
    (`tangents_1`, …) in the order of the outputs that they are gradients of.
    """
    saved = {node.name: node for node in forward}
    result = next(node for node in forward.graph.nodes if node.op == "output")
    returned = result.args[0] if isinstance(result.args[0], tuple | list) else result.args
    results = iter(returned)
    for node in backward.nodes:
        tensor = calls.output(node) if node.op == "placeholder" else None
        if tensor is None:
            continue
        if node.name.startswith("tangents_"):
            candidates: Iterable[object] = results
        else:
            candidates = [saved.get(node.name)]
        for candidate in candidates:
            source = forward.of_result(candidate)
            if source is not None and source[0] == calls.shape_of(tensor):
                yield node, source[1]
                break
