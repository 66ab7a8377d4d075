"""Programs for the tests of this room, as ATen graphs."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.operators.table import row_of


def aten(function: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    """The operators that `function` calls, in order."""
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def run(graph: fx.Graph, *inputs: Tensor) -> Any:
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)(*inputs)


def calls(graph: fx.Graph) -> list[str]:
    """Names of the operators that run, in order."""
    return [str(n.target).removeprefix("aten.") for n in graph.nodes if n.op == "call_function"]


def stays(rewrite: Callable[[fx.Graph], Any], function: Callable[..., Any], *inputs: Tensor) -> Any:
    """The result of `rewrite` for a program whose operators it must not change."""
    graph = aten(function, *inputs)
    before = calls(graph)
    given = rewrite(graph)
    assert calls(graph) == before
    return given


def is_view(node: fx.Node) -> bool:
    """By the operator table's class, not by the pass that is under test."""
    row = row_of(node.target)
    return node.op == "call_function" and row is not None and row.operator_class == "layout"


def neighbours(graph: fx.Graph) -> Iterator[tuple[str, str]]:
    """Every operator with every operator whose value it reads, through any number of views."""
    for consumer in graph.nodes:
        if consumer.op != "call_function" or is_view(consumer):
            continue
        todo, seen = list(consumer.all_input_nodes), set[str]()
        while todo:
            node = todo.pop()
            if is_view(node):
                # Only the first operand of a view is what it shows.
                todo.append(node.all_input_nodes[0])
            elif node.op == "call_function" and node.name not in seen:
                seen.add(node.name)
                yield node.name, consumer.name
