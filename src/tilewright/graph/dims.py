"""Symbolic shapes: every tensor of a captured graph in the named dimensions of its case.

    x[N, M] → max over M → [N] → unsqueeze → [N, 1] → x − · → [N, M]

Names propagate through the operators from the inputs that the case names, so two dimensions stay
distinct even if their sizes are equal. A parameter's axes get their names from the operators that use
it. An axis without a name is a number. Every expression is checked against the captured size.
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
"""The shape of a node's tensor; for several results, a tuple of shapes (None: not a tensor)."""


class SymbolicShapes(dict["Node", Shapes]):
    """The symbolic shape of every node whose result is a tensor.

    `sizes` has each named dimension's size, in the case's order, and `input_names` those that name an
    input's axis; `factors` has the factors of each axis, major to minor (`B·S` is not `S·B`).
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
        """Sizes and factors of a node with one result; None for anything else."""
        factors = self.factors.get(cast("Node", value))
        if not isinstance(factors, tuple):
            return None
        return tuple(int(self.number(sympy.Mul(*axis))) for axis in factors), factors


def axis_text(expression: sympy.Expr) -> str:
    """An axis as text: `4·D`, `D/H`."""
    return str(expression).replace("**", "^").replace("*", "·")


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

    Raises `CaptureError` if a size depends on data.
    """
    input_names = {name for axes in named_inputs.values() for name in axes if name}
    if forward is not None:
        sizes = forward.sizes | dict(sizes)
        input_names |= forward.input_names
    names = AxisNames(sizes, input_names)
    shapes = SymbolicShapes(graph, sizes, input_names)
    inherited = dict(_inherited(forward, graph)) if forward is not None else {}
    known: dict[Node, Result] = {}
    for node in graph.nodes:
        if node.op == "output" or not any(tensor is not None for tensor in calls.outputs(node)):
            continue
        if node in inherited:
            known[node] = inherited[node]
        elif node.op in ("placeholder", "get_attr"):
            known[node] = _input(node, names, named_inputs.get(node.name))
        else:
            known[node] = _checked(node, names, _apply(node, names, known))
    names.infer_names()
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
    """The facts about a node for its row's shape rule."""
    arguments, tensors = calls.arguments(node), calls.outputs(node)

    def axes_of(argument: object) -> Axes | None:
        found = known.get(cast("Node", argument))
        return found if isinstance(found, tuple) else None

    def dtype_of(name: str) -> str:
        return calls.dtype_name(calls.tensor(arguments[name]).dtype)

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
    """The result, with each axis that does not have the captured size replaced by an unnamed one."""

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
    # A rule may omit results.
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


def _inherited(forward: SymbolicShapes, backward: Graph) -> Iterator[tuple[Node, Axes]]:
    """The axes of a backward graph's placeholders that are saved forward values or gradients of forward outputs.

    AOTAutograd keeps a saved tensor's name from the forward graph, and passes the tangents
    (`tangents_1`, …) in the order of their outputs.
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
