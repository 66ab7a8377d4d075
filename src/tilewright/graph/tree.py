"""The graph of a model as an annotated tree: modules, steps, operators with classes, shapes and dtypes."""

from __future__ import annotations

import operator
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from tilewright.graph import calls
from tilewright.graph.dims import axis_text
from tilewright.graph.roles import roles
from tilewright.graph.source import source_line
from tilewright.operators.table import row_of
from tilewright.records.program import OperatorClass

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree
    from torch.fx import Graph, Node

    from tilewright.graph.dims import SymbolicShapes

STYLES: dict[OperatorClass, str] = {
    "compute": "bold magenta",
    "pointwise": "green",
    "reduction": "cyan",
    "layout": "bright_black",
    "random": "yellow",
    "library": "blue",
    "unknown": "red",
}


@dataclass(frozen=True)
class TensorNote:
    """One tensor: its node, its shape in the case's names and in numbers, its dtype."""

    name: str
    shape: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(self.shape)}]"


@dataclass(frozen=True)
class OperatorNote:
    """One operator call with its operands and results."""

    name: str
    target: str
    role: str
    operator_class: OperatorClass
    operands: tuple[TensorNote, ...]
    results: tuple[TensorNote, ...]
    source: str | None


@dataclass(frozen=True)
class Group:
    """A module, or one step of it: consecutive operators with one role.

    `title` is the role of a step, the class of a module; `module` its path, empty at the top.
    """

    title: str
    module: str
    source: str | None
    children: tuple[Group | OperatorNote, ...]

    def operators(self) -> Iterator[OperatorNote]:
        for child in self.children:
            if isinstance(child, Group):
                yield from child.operators()
            else:
                yield child


def annotated_tree(graph: Graph, symbolic: SymbolicShapes, title: str = "graph") -> Group:
    """The operators of `graph` grouped by module path (if capture recorded one) and role, in the graph's order."""
    role_of = roles(graph)
    notes = [
        (_modules(node), _note(node, role_of[node], symbolic))
        for node in graph.nodes
        if node.op == "call_function" and node.target is not operator.getitem
    ]
    return Group(title, "", None, tuple(_grouped(notes, 0)))


Module = tuple[str, str]
"""Path in the model, and class."""


def _grouped(notes: list[tuple[tuple[Module, ...], OperatorNote]], depth: int) -> Iterator[Group]:
    def module(entry: tuple[tuple[Module, ...], OperatorNote]) -> Module | None:
        return entry[0][depth] if depth < len(entry[0]) else None

    for inner, entries in groupby(notes, module):
        members = list(entries)
        if inner is None:
            for role, step in groupby((note for _, note in members), lambda note: note.role):
                operators = tuple(step)
                path = members[0][0][-1][0] if members[0][0] else ""
                yield Group(role, path, operators[0].source, operators)
        else:
            children = tuple(_grouped(members, depth + 1))
            path, class_name = inner
            # A module that is a single step is shown as that step.
            yield children[0] if len(children) == 1 else Group(class_name, path, None, children)


def _modules(node: Node) -> tuple[Module, ...]:
    """The modules the node was captured in, outermost first; a backward node has its forward node's."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    named = ((_path(str(path)), getattr(kind, "__name__", str(kind))) for path, kind in stack.values())
    return tuple((path, kind) for path, kind in named if path)


def _path(path: str) -> str:
    """`layers.0.norm` for Dynamo's `L['self'].layers[0].norm` and its other notations."""
    path = re.sub(r"getattr\((.*), ['\"](\w+)['\"]\)", r"\1.\2", path)
    path = re.sub(r"^L\[['\"]\w+['\"]\]", "", path).replace("._modules", "")
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path).strip(".")


def _note(node: Node, role: str, symbolic: SymbolicShapes) -> OperatorNote:
    row = row_of(node.target)
    return OperatorNote(
        name=node.name,
        target=str(node.target),
        role=role,
        operator_class=row.operator_class if row else "unknown",
        operands=tuple(tensor for operand in node.all_input_nodes for tensor in _tensors(operand, symbolic)),
        results=tuple(_tensors(node, symbolic)),
        source=source_line(node),
    )


def _tensors(node: Node, symbolic: SymbolicShapes) -> Iterator[TensorNote]:
    for tensor, shape in zip(calls.outputs(node), symbolic.of_outputs(node), strict=True):
        if tensor is not None:
            sizes = calls.shape_of(tensor)
            dtype = calls.dtype_name(tensor.dtype)
            axes = tuple(map(str, sizes)) if shape is None else tuple(map(axis_text, shape))
            yield TensorNote(node.name, axes, sizes, dtype)


def steps(tree: Group) -> list[str]:
    """The roles of a model in order, with Q, K and V merged and repetitions removed.

    >>> steps(Group("graph", "", None, ()))
    []
    """
    projections = {"Q", "K", "V"}
    line: list[str] = []
    for note in tree.operators():
        role = note.role
        at = -2 if line[-1:] == ["heads"] else -1
        last = line[at] if len(line) >= -at else ""
        if role == "heads":
            if set(last.split(",")) <= projections and line[-1] != "heads":
                line.append(role)
        elif role in projections and last and set(last.split(",")) <= projections:
            if role not in last.split(","):
                line[at] = f"{last},{role}"
        elif line[-1:] != [role]:
            line.append(role)
    return line


def render(tree: Group) -> Tree:
    """The tree for a terminal: a branch per module and step, a leaf per operator, coloured by class."""
    from rich.text import Text
    from rich.tree import Tree

    root = Tree(Text.assemble((tree.title, "bold"), "  ", " → ".join(steps(tree))))
    _grow(root, tree)
    return root


def _grow(branch: Tree, group: Group) -> None:
    from rich.text import Text

    for child in group.children:
        if isinstance(child, Group):
            source = f"  {child.source}" if child.source else ""
            module = f"  {child.module}" if child.module else ""
            _grow(branch.add(Text.assemble((child.title, "bold"), module, (source, "dim"))), child)
        else:
            branch.add(_leaf(child))


def _leaf(note: OperatorNote) -> Text:
    from rich.text import Text

    operands, results = ", ".join(map(str, note.operands)), ", ".join(map(str, note.results))
    name = note.target.removeprefix("aten.")
    kind = (f"{note.operator_class} ", STYLES[note.operator_class])
    return Text.assemble(kind, f"{name}  {operands} → {results}")
