"""Inserts calls with fake tensors of their results: into a graph of ATen operators, or (`Writer`) of torch's calls."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, reduce
from typing import Any

import torch
from torch import fx
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

from tilewright.graph import calls
from tilewright.graph.canonical import canonical_name, tensor_of
from tilewright.records.errors import Refusal

REFUSED_VIEW = (RuntimeError, ValueError)
"""Raised by a call on a fake tensor that is no view of it: "view size is not compatible with input tensor's size and
stride", of which eager makes a RuntimeError."""


def insert_call(before: Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
    """Insert a call in front of `before`, with that node's source line and module.

    An operand, or else another node of the graph, has a fake tensor (`meta["val"]`), whose mode computes the result's.
    """
    node = insert_known(before, target, None, *args, **kwargs)
    values = (value for known in node.all_input_nodes or before.graph.nodes for value in calls.outputs(known))
    mode = next(mode for value in values if (mode := getattr(value, "fake_mode", None)) is not None)
    fake_args, fake_kwargs = map_arg((args, kwargs), lambda operand: operand.meta["val"])
    with mode, torch.no_grad():
        node.meta["val"] = target(*fake_args, **fake_kwargs)
    return node


def insert_known(before: Node, target: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Node:
    """As `insert_call`, for a call whose fake result is `value`."""
    with before.graph.inserting_before(before):
        name = calls.operator_name(target).rpartition(".")[2]
        node = before.graph.create_node("call_function", target, args, kwargs, name=name)
    node.meta = {key: kept for key, kept in before.meta.items() if key not in ("val", "tensor_meta")}
    node.meta["val"] = value
    return node


def insert_again(before: Node, call: Node, *operands: Any) -> Node:
    """Insert `call` again in front of `before`, with other first arguments."""
    target: Any = call.target
    return insert_call(before, target, *operands, *call.args[len(operands) :], **call.kwargs)


def insert_formula(before: Node, formula: Callable[..., Any], *args: Any) -> Any:
    """Insert the operators that `formula` calls, in front of `before`; its results as nodes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    operands = list(dict.fromkeys(operand for operand in args if isinstance(operand, fx.Node)))

    def of_tensors(*tensors: Any) -> Any:
        known = dict(zip(operands, tensors, strict=True))
        return formula(*map_arg(args, known.__getitem__))

    values = [operand.meta["val"] for operand in operands]
    with values[0].fake_mode:
        traced = make_fx(of_tensors)(*values).graph
    found: dict[Node, Any] = dict(zip(traced.find_nodes(op="placeholder"), operands, strict=True))
    for step in traced.nodes:
        if step.op == "call_function":
            given, named = map_arg((step.args, step.kwargs), found.__getitem__)
            found[step] = insert_known(before, step.target, step.meta.get("val"), *given, **named)
    return map_arg(traced.output_node().args[0], found.__getitem__)


def insert_value(before: Node, formula: Callable[..., torch.Tensor], *args: Any) -> Node:
    """As `insert_formula`, for a formula of one result."""
    result: Node = insert_formula(before, formula, *args)
    return result


def replace(node: Node, new: Node) -> None:
    """Replace `node` by `new` and erase it."""
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)


def insert_results(before: Node, call: Node, count: int) -> list[Node]:
    """The first `count` of the results of `call`, in front of `before`."""
    return [insert_call(before, operator.getitem, call, index) for index in range(count)]


def replace_results(node: Node, results: Sequence[Node | None]) -> None:
    """Replace the results of `node` by these, cast to the captured dtypes, and erase it."""
    for user in list(node.users):
        index: Any = user.args[1]
        if (result := results[index]) is not None:
            dtype = user.meta["val"].dtype
            if result.meta["val"].dtype != dtype:
                result = insert_call(node, torch.ops.aten._to_copy.default, result, dtype=dtype)
            user.replace_all_uses_with(result)
        node.graph.erase_node(user)
    node.graph.erase_node(node)


def contiguous(before: Node, operand: Node) -> Node:
    """A copy of `operand` without gaps, in front of `before`."""
    return insert_call(before, torch.ops.aten.clone.default, operand, memory_format=torch.contiguous_format)


def retrace_views(node: Node) -> None:
    """Recompute the strides of all views of `node`, whose layout has changed, from its own; if one of them can be no
    view any more, they and all other readers get a copy without gaps."""
    found: dict[Node, Any] = {node: node.meta["val"]}
    for view in _views(node):
        target: Any = view.target
        args, kwargs = map_arg((view.args, view.kwargs), lambda operand: found.get(operand, operand.meta["val"]))
        try:
            with node.meta["val"].fake_mode, torch.no_grad():
                found[view] = target(*args, **kwargs)
        except REFUSED_VIEW:
            readers = list(node.users)
            copy = contiguous(node.next, node)
            for reader in readers:
                reader.replace_input_with(node, copy)
            return
    for view, value in found.items():
        view.meta["val"] = value


def _views(node: Node) -> Iterator[Node]:
    """Views of `node`, each before its own."""
    for user in node.users:
        if calls.is_view(user):
            yield user
            yield from _views(user)


def insert_like(
    before: Node, source: Node, target: str | Callable[..., Any], value: Any, *args: Any, **kwargs: Any
) -> Node:
    """Insert a call of a function or method in front of `before` in a torch-level graph, with the line and module of
    `source`; `value` is its fake result."""
    create = before.graph.call_method if isinstance(target, str) else before.graph.call_function
    with before.graph.inserting_before(before):
        node = create(target, args, kwargs)  # type: ignore[arg-type]
    node.meta = {**source.meta, "example_value": value}
    return node


class Writer:
    """Adds nodes before one node of a torch-level graph, each with the fake tensor of its result, as Dynamo does."""

    def __init__(self, graph: Graph, before: Node) -> None:
        self.graph, self.before = graph, before
        mode = getattr(tensor_of(before), "fake_mode", None)
        if mode is None:
            raise Refusal("the graph was not traced with fake tensors")
        self.mode: AbstractContextManager[object] = mode

    def call(self, function: Callable[..., object], *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(function, args, kwargs)
        return self._with_example(node, function)

    def method(self, name: str, *args: Any, **kwargs: Any) -> Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_method(name, args, kwargs)
        return self._with_example(node, getattr(torch.Tensor, name))

    def formula(self, formula: Callable[..., Any], *args: Any, **kwargs: Any) -> Node:
        """The calls that `formula` makes on these arguments; its result."""
        last, tracer = self.before.prev, GraphAppendingTracer(self.graph)

        def proxy(node: Node) -> Any:
            return Proxy(node, tracer)

        given, named = map_arg((args, kwargs), proxy)
        with self.graph.inserting_before(self.before):
            result: Node = formula(*given, **named).node
        while (last := last.next) is not self.before:
            self._with_example(last)
        return result

    def cast(self, x: Node, dtype: torch.dtype) -> Node:
        """`x` in `dtype`: itself if it has that."""
        return x if tensor_of(x).dtype == dtype else self.method("to", x, dtype)

    def joined(self, function: Callable[..., object], nodes: Iterable[Node]) -> Node:
        """The nodes reduced by the binary `function`, from left to right."""
        return reduce(lambda one, other: self.call(function, one, other), nodes)

    def _with_example(self, node: Node, function: Callable[..., object] | None = None) -> Node:
        kept = ("stack_trace", "nn_module_stack", "custom")
        node.meta = {key: value for key, value in self.before.meta.items() if key in kept}
        node.meta["example_value"] = self.run(node, {}, function)
        return node

    def run(self, node: Node, instead: Mapping[Node, torch.Tensor], function: Callable[..., Any] | None = None) -> Any:
        """The fake result of `node`, with the fake tensors of `instead` for some arguments."""
        args, kwargs = map_arg(
            (node.args, node.kwargs), lambda x: instead[x] if x in instead else x.meta["example_value"]
        )
        if function is None:
            function = getattr(torch.Tensor, node.target) if isinstance(node.target, str) else node.target
        assert callable(function)
        with self.mode, torch.set_grad_enabled(self._records_gradients):
            return function(*args, **kwargs)

    @cached_property
    def _records_gradients(self) -> bool:
        """Whether gradients are recorded at this place: what the last switch in front of it says, else as now."""
        node = self.before
        while (node := node.prev).op != "root":
            if canonical_name(node) == "_set_grad_enabled":
                return node.args[0] is True
        return torch.is_grad_enabled()
