"""Programs for the tests of this room, as ATen graphs."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.experimental.proxy_tensor import make_fx

from tilewright.compile.capture import capture
from tilewright.compile.planner import Planner
from tilewright.hardware.target import target_named
from tilewright.operators.table import row_of
from tilewright.records.case import Case, InputSpec


def aten(function: Callable[..., Any], *inputs: Tensor) -> fx.Graph:
    """The operators that `function` calls, in order."""
    return make_fx(function, tracing_mode="fake")(*inputs).graph


def run(graph: fx.Graph, *inputs: Tensor) -> Any:
    graph.lint()
    return fx.GraphModule(torch.nn.Module(), graph)(*inputs)


def calls(graph: fx.Graph) -> list[str]:
    """Names of the operators that run, in order."""
    return [str(n.target).removeprefix("aten.") for n in graph.nodes if n.op == "call_function"]


def planned(model: Callable[..., Any], shapes: str, training: bool = True) -> Any:
    """The model's plan for an H200."""
    case = Case("subject", lambda: model, InputSpec.parse_many(shapes), training=training)
    return capture(case, Planner(target_named("h200"))).plan


def written(graphs: Iterable[Any]) -> list[Tensor]:
    """What the generated kernels of a plan's graphs write."""
    regions = [region for graph in graphs for region in graph.fusion.regions]
    return [output.meta["val"] for region in regions for output in region.lowered.outputs]


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
