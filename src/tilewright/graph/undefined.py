"""Backward graphs without the gradients that autograd leaves undefined, such as that of logits beside a loss.

For an undefined gradient AOTAutograd materialises zeros, as large as the logits, which backward would add; an input
that no defined gradient reaches would have zeros for a gradient, or NaN, where eager's is None. Here autograd passes
None, and backward is compiled without that gradient: at once for those that a loss leaves undefined, else when first
they are. In the graph, zeros take the gradient's place; once sizes are known, `passes/zeros.py` removes them and
what depends on them alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from tilewright.graph.insert import insert_known
from tilewright.pytorch.sizes import computed

if TYPE_CHECKING:
    from tilewright.capture.aot import Boxed

UNDEFINED = "undefined"
"""Metadata key of zeros that stand for an incoming gradient: its name."""
aten = torch.ops.aten


def is_tangent(node: fx.Node) -> bool:
    """Whether this is an incoming gradient of a joint or backward graph."""
    return node.op == "placeholder" and "tangents" in str(node.target)


def gradients(graph: fx.Graph) -> set[fx.Node]:
    """The incoming gradients of a joint or backward graph, and all nodes that depend on them."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if is_tangent(node) or any(operand in found for operand in node.all_input_nodes):
            found.add(node)
    return found


def insert_zeros(backward: fx.Graph) -> list[int]:
    """Insert zeros for each of several incoming gradients, which nothing reads yet; the gradients' places.

    None for a gradient that is alone, since backward does not run without it, or where an input is no tensor.
    """
    inputs = backward.find_nodes(op="placeholder")
    tangents = [node for node in inputs if is_tangent(node)]
    after = next(node for node in backward.nodes if node.op != "placeholder")
    symbols = {node.meta["val"].node.expr: node for node in inputs if isinstance(node.meta.get("val"), torch.SymInt)}
    if len(tangents) < 2 or not all(_are_spelled(node.meta.get("val"), symbols) for node in tangents):
        return []
    for node in tangents:
        value = node.meta["val"]
        shape, strides = ([_spelled(after, n, symbols) for n in numbers] for numbers in (value.shape, value.stride()))
        elements: Any = 1 + sum(n * stride for n, stride in zip(value.shape, value.stride(), strict=True))
        with value.fake_mode, torch.no_grad():
            storage = torch.empty([elements], dtype=value.dtype, device=value.device)
        options = {"dtype": value.dtype, "device": value.device, "pin_memory": False}
        zeros = insert_known(after, aten.full.default, storage, [_spelled(after, elements, symbols)], 0, **options)
        insert_known(after, aten.as_strided.default, value, zeros, shape, strides).meta[UNDEFINED] = node.name
    return [place for place, node in enumerate(inputs) if node in tangents]


def _are_spelled(value: object, symbols: Mapping[Any, fx.Node]) -> bool:
    """Whether `symbols` are all that the sizes and strides of this tensor consist of."""
    numbers = (*value.shape, *value.stride()) if isinstance(value, torch.Tensor) else [None]
    return all(
        isinstance(n, int) or (isinstance(n, torch.SymInt) and n.node.expr.free_symbols <= symbols.keys())
        for n in numbers
    )


def _spelled(before: fx.Node, size: int | torch.SymInt, symbols: Mapping[Any, fx.Node]) -> int | fx.Node:
    """A size as a number, or as a node: an input of the graph, or computed from such in front of `before`."""
    if isinstance(size, int):
        return size
    graph, known = before.graph, set(before.graph.nodes)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    proxies = {symbol: fx.Proxy(node, tracer) for symbol, node in symbols.items()}
    with graph.inserting_before(before):
        found = computed(size.node.expr, proxies)
    for node in [node for node in graph.nodes if node not in known]:
        target: Any = node.target
        node.meta["val"] = target(*fx.map_arg(node.args, lambda operand: operand.meta["val"]))
    return found.node if isinstance(found, fx.Proxy) else int(found)


def leave_out(backward: fx.Graph, places: Iterable[int]) -> None:
    """Replace the inputs with these indices by their zeros, and erase the zeros of the others."""
    inputs = backward.find_nodes(op="placeholder")
    absent = {inputs[place].name: inputs[place] for place in places}
    for zeros in [node for node in backward.nodes if UNDEFINED in node.meta]:
        if (node := absent.get(zeros.meta[UNDEFINED])) is not None:
            node.replace_all_uses_with(zeros)
            backward.erase_node(node)
        _erase_unread(zeros)


def _erase_unread(node: fx.Node) -> None:
    if node.op == "call_function" and not node.users:
        operands = node.all_input_nodes
        node.graph.erase_node(node)
        for operand in operands:
            _erase_unread(operand)


def left_out(backward: fx.Graph) -> list[str]:
    """The names of the incoming gradients for which this graph reads zeros."""
    return [node.meta[UNDEFINED] for node in backward.nodes if UNDEFINED in node.meta]


def expected_undefined(backward: fx.Graph, tangents: Sequence[int]) -> list[int]:
    """The places of gradients that a training step does not give: all but those of its losses.

    A loss has no dimensions. Where no result is one, all gradients are expected.
    """
    inputs = backward.find_nodes(op="placeholder")
    others = [place for place in tangents if inputs[place].meta["val"].dim()]
    return others if len(others) < len(tangents) else []


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """A graph of its own with the same nodes and metadata."""
    graph = fx.Graph()
    result = graph.output(graph.graph_copy(module.graph, {}))
    result.meta = dict(module.graph.output_node().meta)
    return fx.GraphModule(module, graph)


def leave_undefined(results: Iterable[object]) -> None:
    """Let autograd hand None to the backward of a compiled graph for each of its results without a gradient."""
    for result in results:
        node = result.grad_fn if isinstance(result, torch.Tensor) else None
        if type(node).__name__ == "CompiledFunctionBackward":
            # The function's own `ctx.set_materialize_grads`; all results share the node.
            node.materialize_grads = False  # type: ignore[union-attr]
            return


class BackwardByGradients:
    """Runs a backward graph without those incoming gradients that autograd leaves undefined.

    `tangents` are the places of all incoming gradients; `compiled`, for the places of undefined gradients, takes the
    other arguments. `compile_without` makes it when it is needed first.
    """

    _boxed_call = True

    def __init__(
        self,
        tangents: Sequence[int],
        compiled: Mapping[frozenset[int], Boxed],
        compile_without: Callable[[frozenset[int]], Boxed],
    ) -> None:
        self.tangents = tangents
        self.compiled = dict(compiled)
        self.compile_without = compile_without

    def __call__(self, args: list[Any]) -> Sequence[Any]:
        undefined = frozenset(place for place in self.tangents if args[place] is None)
        if undefined not in self.compiled:
            self.compiled[undefined] = self.compile_without(undefined)
        given = [value for place, value in enumerate(args) if place not in undefined]
        args.clear()
        return self.compiled[undefined](given)
