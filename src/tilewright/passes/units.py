"""The units of fusion: the operators of a graph without the views between them."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from math import prod
from typing import Any

from torch import fx

from tilewright.graph.calls import class_of, dtype_name, is_known, outputs, readers, results, shape_of, through
from tilewright.graph.specialise import has_symbols
from tilewright.graph.views import hazards
from tilewright.hardware.target import Target
from tilewright.kernels.dropout_add.stream import keep_mask
from tilewright.loops.trace import SUPPORTED
from tilewright.operators.row import Row
from tilewright.operators.table import row_of
from tilewright.passes.simplify import is_pure
from tilewright.records.program import GraphName


def is_view(node: fx.Node) -> bool:
    """Whether a node only changes how elements are indexed: a layout operator, or one result of several."""
    return class_of(node) == "layout"


def is_fusible(node: fx.Node) -> str | None:
    """None if a nest can compute the node; else the reason why not."""
    if node.op != "call_function":
        return "is no operator"
    if node.target is keep_mask:
        return "the mask is drawn by PyTorch's own kernel, whose random numbers no generated kernel has"
    row = row_of(node.target)
    if row is None or row.body is None or row.operator_class in ("compute", "library", "random"):
        return _without_body(node.target, row)
    # Results without a reader do not count.
    tensors = [t for value in (*values_of(node), *node.all_input_nodes) for t in results(value)]
    for tensor in tensors:
        if dtype_name(tensor.dtype) not in SUPPORTED:
            return f"{dtype_name(tensor.dtype)} is a dtype for which no kernel is generated"
        # To compare a symbol would bind the program to its value.
        if has_symbols(tensor):
            return "its sizes are not known yet"
        if prod(tensor.shape) == 0:
            return "a tensor is empty"
    if len({t.device for t in tensors if t.dim() or t.device.type != "cpu"}) > 1:
        return "its tensors are on different devices"
    if any(isinstance(a, fx.Node) and not results(a) for a in node.all_input_nodes):
        return "an operand is no tensor"
    return None


def _without_body(operator: Any, row: Row | None) -> str:
    if row is None:
        return f"{operator} has no row in the operator table"
    if row.own and row.body is None:
        return f"{operator} is a kernel of tilewright's own, into which nothing can be fused"
    if row.operator_class == "random" and str(operator).startswith("tilewright."):
        return f"{operator} only advances PyTorch's random generator; there is no kernel to fuse with"
    if row.operator_class in ("compute", "library", "random"):
        return f"{operator} is a library call, into which nothing can be fused"
    return f"no kernel is generated for {operator}"


def is_elementwise(node: fx.Node) -> bool:
    """Whether each element of the only result depends on the same element of each operand, or on 0-d operands."""
    found = results(node)
    if class_of(node) != "pointwise" or len(found) != 1 or values_of(node) != [node]:
        return False
    shape = shape_of(found[0])
    operands = [t for operand in node.all_input_nodes for t in results(operand)]
    computed_views = any(is_view(x) and is_fusible(behind_views(x)) is None for x in node.all_input_nodes)
    return not computed_views and all(shape_of(t) == shape or not t.dim() for t in operands)


def whose_kernel(node: fx.Node, target: Target) -> str | None:
    """How one of tilewright's own operators without a body runs; None for other operators."""
    row = row_of(node.target)
    if row is None or not row.own or row.body is not None:
        return None
    tensor = next(tensor for value in (node, *node.all_input_nodes) for tensor in results(value))
    if dtype_name(tensor.dtype) == "float64":
        return f"{node.target} is computed by PyTorch's operators: its hand-written kernel is not for float64"
    if not target.runs_on_gpu(tensor.device):
        return f"{node.target} is computed by PyTorch's operators: its hand-written kernel runs on GPUs only"
    return f"{node.target} is a hand-written kernel of tilewright's, into which nothing can be fused"


def sources(node: fx.Node) -> Iterator[fx.Node]:
    """The operators and inputs that `node` reads, through views."""
    for operand in node.all_input_nodes:
        yield behind_views(operand)


def behind_views(node: fx.Node) -> fx.Node:
    """The operator or input of which `node` is a view or a result; one of several results is no tensor itself."""
    return through(node, is_view)


def picks(node: fx.Node) -> bool:
    """Whether this is one result of several; a part of a `split` is a view instead."""
    return node.target is operator.getitem and not is_view(node.all_input_nodes[0])


def stored(node: fx.Node) -> fx.Node:
    """The tensor in memory of which `node` is a view; one of several results stands for itself."""
    return through(node, lambda view: is_view(view) and not picks(view))


def values_of(node: fx.Node) -> list[fx.Node]:
    """The nodes that hold a result: the node itself, or one `getitem` for each result of several."""
    if isinstance(node.meta.get("val"), (tuple, list)):
        return [user for user in node.users if user.target is operator.getitem]
    return [node]


def with_results(members: Iterable[fx.Node], order: dict[fx.Node, int]) -> list[fx.Node]:
    """`members` and the `getitem`s of those with several results, in graph order."""
    everything = {n for m in members for n in (m, *values_of(m))}
    return sorted(everything, key=order.__getitem__)


def live_out(members: Sequence[fx.Node]) -> list[fx.Node]:
    """The values of `members` that other nodes read, and that must therefore be in memory."""
    inside = set(members)
    return [v for member in members for v in values_of(member) if any(reader not in inside for reader in readers(v))]


def has_known_sizes(node: fx.Node) -> bool:
    """Whether no size of a value depends on data (`nonzero`); a value with such sizes is never recomputed."""
    return all(value is None or all(map(is_known, value.shape)) for value in outputs(node))


class Reachability:
    """Ancestors and descendants of every node as bit sets. A draw or write also depends on the one before it, and calls
    that share memory with a write keep their order (`hazards`)."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = list(graph.nodes)
        self.order = {node: i for i, node in enumerate(self.nodes)}
        self.bit = {node: 1 << i for node, i in self.order.items()}
        self.above: dict[fx.Node, int] = dict.fromkeys(graph.nodes, 0)
        self.below: dict[fx.Node, int] = dict.fromkeys(graph.nodes, 0)
        self.views: dict[fx.Node, int] = dict.fromkeys(graph.nodes, 0)
        ordered = [n for n in graph.nodes if n.op == "call_function" and not is_pure(n)]
        earlier = hazards(graph)
        for node, before in pairwise(reversed(ordered)):
            earlier[node].add(before)
        for node in graph.nodes:
            for source in (*node.all_input_nodes, *earlier.get(node, ())):
                self.above[node] |= self.bit[source] | self.above[source]
        for node in reversed(graph.nodes):
            for source in (*node.all_input_nodes, *earlier.get(node, ())):
                self.below[source] |= self.bit[node] | self.below[node]
            for source in node.all_input_nodes if is_view(node) else ():
                self.views[source] |= self.bit[node] | self.views[node]

    def makes_cycle(self, members: Iterable[fx.Node]) -> bool:
        """Whether a node outside depends on a member and a member on it; views between members count as members."""
        inside = above = below = 0
        for node in members:
            inside |= self.bit[node] | self.views[node]
            above |= self.above[node]
            below |= self.below[node]
        return bool(above & below & ~inside)

    def merge(self, members: Iterable[fx.Node]) -> None:
        """Treat these nodes as one from now on: each gets the ancestors and descendants of all."""
        joined = list(members)
        inside = above = below = 0
        for node in joined:
            inside |= self.bit[node]
            above |= self.above[node]
            below |= self.below[node]
        behind = self._lacking(joined, inside | above, self.above, self.below)
        before = self._lacking(joined, inside | below, self.below, self.above)
        for node in behind:
            self.above[node] |= inside | above
        for node in before:
            self.below[node] |= inside | below

    def _lacking(
        self, members: list[fx.Node], wanted: int, known: dict[fx.Node, int], others: dict[fx.Node, int]
    ) -> list[fx.Node]:
        """The members, and the nodes that `others` has for them, for which `known` lacks some of `wanted`.

        `known` has for such a node all that it has for the member, so most nodes are skipped at once.
        """
        lacking = complete = 0
        for node in members:
            reached = self.bit[node] | others[node]
            if wanted & ~(known[node] | self.bit[node]):
                lacking |= reached
            else:
                complete |= reached
        places = bin(lacking & ~complete)[:1:-1]
        found, place = [], places.find("1")
        while place >= 0:
            found.append(self.nodes[place])
            place = places.find("1", place + 1)
        return found


def kernel_name(members: list[fx.Node], graph_name: GraphName, number: int) -> str:
    """A C identifier that names the kernel's operators: `forward3_native_layer_norm_add`."""
    words: list[str] = []
    for node in members:
        word = str(node.target).split(".")[1] if "." in str(node.target) else node.name
        if word not in words:
            words.append(word)
    shown = "_".join(words[:4]) + ("_and_more" if len(words) > 4 else "")
    return f"{graph_name}{number}_{shown.strip('_')}"
