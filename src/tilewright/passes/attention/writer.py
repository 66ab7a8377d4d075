"""Adds nodes to a torch-level graph as Dynamo traces one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from functools import reduce
from typing import Any

import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

from tilewright.passes.attention.spelling import Refusal, tensor_of


class Writer:
    """Adds nodes before one node of a graph, each with the fake tensor of its result."""

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
        with self.mode:
            return function(*args, **kwargs)
