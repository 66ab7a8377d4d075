"""Convolutions of 16-bit floats on a GPU read and write channels-last tensors, as its matrix units want them.

    y = conv2d(x, w)          →   y = conv2d(x.contiguous(channels_last), w.contiguous(channels_last))
    return relu(y)                return relu(y).contiguous()

cuDNN's fast kernels take channels-last operands, and convert others before and after each convolution (30 % of a
ResNet's inference on an H200). Pointwise operators, norms that take kept statistics and pooling keep the layout of
their operand, so that one copy at the first convolution serves the whole graph: `contiguous` of a tensor that has the
layout already is no copy. Results and views keep the strides that eager gives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import Any

import torch
from torch import fx

from tilewright.graph.source import source_line
from tilewright.hardware.target import Target
from tilewright.passes.attention.spelling import argument, example, spelled
from tilewright.records.program import Decision, Verdict

DTYPES = (torch.bfloat16, torch.float16)
MIN_CHANNELS = 16
"""Input channels of a group, from which a convolution runs on matrix units without padding."""
STATISTICS = ("group_norm", "instance_norm")
"""Norms whose generated kernels reduce over places: in channels-last tensors they would read with strides."""
VIEWS = ("view", "as_strided")
"""Calls that fail on, or read differently, a tensor with other strides."""


def channels_last(module: fx.GraphModule, target: Target) -> list[Decision]:
    """Rewrite `module`, a torch-level graph from Dynamo, in place; a decision for its convolutions, if it has any."""
    convolutions = [node for node in module.graph.nodes if spelled(node) == "conv2d" and _is_narrow(node)]
    if not target.is_gpu or not convolutions:
        return []
    reason = _refusal(module.graph, convolutions)
    if reason is None:
        for node in convolutions:
            _convert(node)
        _restore(module.graph, set(_reachable(convolutions)))
        module.recompile()
    first = convolutions[0]
    verdict: Verdict = "refused" if reason else "taken"
    why = reason or f"{len(convolutions)} convolutions share the layout"
    source = source_line(first)
    return [Decision("forward", first.name, "channels last", verdict, why, source=source, passed_by="channels_last")]


def _is_narrow(node: fx.Node) -> bool:
    operands = [example(argument(node, place, name)) for place, name in ((0, "input"), (1, "weight"))]
    return all(x is not None and x.dim() == 4 and x.dtype in DTYPES for x in operands)


def _refusal(graph: fx.Graph, convolutions: list[fx.Node]) -> str | None:
    """Why the layout of `graph` stays; None where it changes."""
    work = {node: _multiplications(node) for node in convolutions}
    suited = sum(work[node] for node in convolutions if _weight(node).shape[1] >= MIN_CHANNELS)
    if 2 * suited < sum(work.values()):
        return f"most of the work is in convolutions with fewer than {MIN_CHANNELS} input channels a group"
    reachable = set(_reachable(convolutions))
    if (norm := next((node for node in reachable if _reduces_over_places(node)), None)) is not None:
        return f"{norm.name} reduces over places, which do not lie side by side then"
    for node in reachable:
        if spelled(node) in VIEWS and not _is_dense(node.args[0]):
            return f"{node.name} views a tensor that is not contiguous"
    if any(not _is_dense(node) for node in graph.output_node().all_input_nodes if node in reachable):
        return "a result is not contiguous"
    return None


def _reduces_over_places(node: fx.Node) -> bool:
    """Whether a norm computes statistics over height and width: not a batch norm that takes those it kept."""
    name = spelled(node)
    return name in STATISTICS or (name == "batch_norm" and argument(node, 5, "training") is not False)


def _weight(node: fx.Node) -> torch.Tensor:
    value = example(argument(node, 1, "weight"))
    assert value is not None
    return value


def _multiplications(node: fx.Node) -> int:
    result = example(node)
    sizes = (*_weight(node).shape[1:], *(() if result is None else result.shape))
    return prod(int(size) if isinstance(size, int) else 1 for size in sizes)


def _is_dense(node: Any) -> bool:
    value = example(node)
    return value is None or value.is_contiguous()


def _reachable(start: Iterable[fx.Node]) -> Iterator[fx.Node]:
    """What is computed from the results of `start`, and these."""
    seen, todo = set(start), list(start)
    while todo:
        node = todo.pop()
        yield node
        fresh = [user for user in node.users if user not in seen]
        seen.update(fresh)
        todo.extend(fresh)


def _convert(node: fx.Node) -> None:
    for place, name in ((0, "input"), (1, "weight")):
        operand = argument(node, place, name)
        converted = _contiguous(node, operand, torch.channels_last)
        if len(node.args) > place:
            node.update_arg(place, converted)
        else:
            node.update_kwarg(name, converted)


def _restore(graph: fx.Graph, reachable: set[fx.Node]) -> None:
    """Results, and what is viewed, lie as eager has them."""
    for node in list(graph.nodes):
        if node.op == "output":
            for result in [x for x in node.all_input_nodes if x in reachable and _rank(x) > 2]:
                node.replace_input_with(result, _contiguous(node, result, torch.contiguous_format))
        elif spelled(node) in VIEWS and node.args[0] in reachable and _rank(node.args[0]) > 2:
            node.update_arg(0, _contiguous(node, node.args[0], torch.contiguous_format))


def _rank(node: Any) -> int:
    value = example(node)
    return 0 if value is None else value.dim()


def _contiguous(before: fx.Node, operand: fx.Node, layout: torch.memory_format) -> fx.Node:
    with before.graph.inserting_before(before):
        made = before.graph.call_method("contiguous", (operand,), {"memory_format": layout})
    made.meta = {key: value for key, value in before.meta.items() if key != "example_value"}
    value = example(operand)
    if value is not None:
        with torch.no_grad():
            made.meta["example_value"] = value.contiguous(memory_format=layout)
    return made
