"""The state of a graph: to take back what a rewrite did to it, and to say what that was."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Any, NamedTuple

from torch import fx


class NodeState(NamedTuple):
    """What defines a node, and its metadata."""

    node: fx.Node
    name: str
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    type: Any
    meta: dict[str, Any]

    @property
    def operands(self) -> list[fx.Node]:
        """The nodes among its arguments."""
        found: list[fx.Node] = []
        fx.map_arg((self.args, self.kwargs), found.append)
        return found

    def calls_as(self, other: NodeState) -> bool:
        """Whether both are the same call of the same operands."""
        same = self.node is other.node and self.target is other.target
        return same and self.args == other.args and self.kwargs == other.kwargs

    def text(self) -> str:
        """`mm(x, w)`."""
        given = [*map(_text, self.args), *(f"{name}={_text(value)}" for name, value in self.kwargs.items())]
        target = self.target if isinstance(self.target, str) else getattr(self.target, "__name__", str(self.target))
        return f"{target}({', '.join(given)})"


def _text(argument: Any) -> str:
    if isinstance(argument, (list, tuple)):
        return f"[{', '.join(map(_text, argument))}]"
    return str(argument)


class Snapshot:
    """A graph as it is now, with the graphs in it: bodies of activation checkpoints and the like."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.bodies = [Snapshot(body) for body in _bodies(graph)]
        self.nodes = {
            n: NodeState(n, n.name, n.op, n.target, n.args, n.kwargs, n.type, dict(n.meta)) for n in graph.nodes
        }

    def put_back(self) -> None:
        """Rebuild the graph and its bodies, in place, out of new nodes with the same names, arguments and metadata."""
        for body in self.bodies:
            body.put_back()
        graph = self.graph
        # A rewrite that failed halfway may have left any order and any arguments.
        current = list(graph.nodes)
        for node in current:
            node.args, node.kwargs = (), {}
        for node in current:
            graph.erase_node(node)
        graph._graph_namespace = type(graph._graph_namespace)()
        self._write(graph)
        if isinstance(graph.owning_module, fx.GraphModule):
            graph.owning_module.recompile()

    def copied(self) -> fx.Graph:
        """A graph of its own as this was, to be run."""
        graph = fx.Graph()
        self._write(graph)
        return graph

    def _write(self, graph: fx.Graph) -> None:
        made: dict[fx.Node, fx.Node] = {}
        for old, state in self.nodes.items():
            args, kwargs = fx.map_arg((state.args, state.kwargs), made.__getitem__)
            new = graph.create_node(state.op, state.target, args, kwargs, state.name, state.type)
            new.meta = dict(state.meta)
            # Dynamo's inputs have attributes that AOTAutograd reads.
            vars(new).update({name: value for name, value in vars(old).items() if name not in vars(new)})
            made[old] = new

    def changes(self, before: Snapshot) -> Iterator[tuple[NodeState | None, NodeState | None]]:
        """The nodes that are not as they were, each before and now; None where it did not or does not exist."""
        for node, now in self.nodes.items():
            then = before.nodes.get(node)
            if then is None or not now.calls_as(then):
                yield then, now
        for node, then in before.nodes.items():
            if node not in self.nodes:
                yield then, None


def _bodies(graph: fx.Graph) -> Iterator[fx.Graph]:
    owner = graph.owning_module
    for node in [] if owner is None else graph.find_nodes(op="get_attr"):
        body = attrgetter(str(node.target))(owner)
        if isinstance(body, fx.GraphModule):
            yield body.graph
