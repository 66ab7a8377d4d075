"""Reduces the memory of convolution gradients on a CPU by the layout of their operands.

    w' = w.clone(channels_last)                   dx, dw, db = convolution_backward(g, x, w, …)
    dx, dw, db = convolution_backward(g, x, w')   →

    dx, dw, db = convolution_backward(g, x, w)    →   dx, dw, db = convolution_backward(g.clone(), x.clone(), w)

First, backward of a dense convolution reads the graph's operand, not forward's copy: oneDNN converts it to its own
layout in any case. Second, if images are small compared with their weights, backward reads contiguous copies. For
channels-last images oneDNN computes the gradient of a depthwise weight of 5 × 5 or more in a workspace of 256 times the
weight's bytes, and PyTorch copies dense weights and their gradients between the layouts. A 7 × 7 window on 2 × 2 pixels
and 128 channels: 6.4 MB and 480 µs, contiguous 0.1 MB and 255 µs; on 16 × 16 pixels and 16 channels: 0.84 MB and 225
µs, contiguous 0.1 MB and 490 µs. With both a tiny ConvNeXt trains in 2.1 MB instead of 8.4.
"""

from __future__ import annotations

import operator
from math import prod

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_call, replace_results
from tilewright.hardware.target import Target

aten = torch.ops.aten
OPERANDS = 3
"""The first arguments: the gradient of the result, the input, the weight."""
DIRECT = 3 * 3
"""Elements of the largest depthwise window for which oneDNN needs no workspace."""
WORKSPACE, COPIES = 256, 3
"""Additional bytes per byte of the weight: oneDNN's workspace (depthwise); copies of the weight and its gradient."""
MOST = 16
"""Additional bytes per byte of the image from which contiguous copies pay; they take up to twice as long."""


def lighten_gradients(graph: fx.Graph, target: Target) -> None:
    """Rewrite `graph`, a joint graph of ATen operators, in place."""
    if target.is_gpu:
        return
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        for copy in [] if _is_depthwise(node) else node.all_input_nodes[1:OPERANDS]:
            if copy.target is aten.clone.default and copy.args[0].op == "placeholder":
                node.replace_input_with(copy, copy.args[0])
        if _needs_much_more(node):
            _replace(node)


def _is_depthwise(node: fx.Node) -> bool:
    weight = calls.output(node.all_input_nodes[OPERANDS - 1])
    groups = calls.number(node.args[9])
    return weight is not None and groups != 1 and tuple(weight.shape[:2]) == (groups, 1)


def _needs_much_more(node: fx.Node) -> bool:
    """Whether channels-last operands need far more additional memory than their image has bytes."""
    tensors = [calls.output(operand) for operand in node.all_input_nodes[:OPERANDS]]
    if len(tensors) < OPERANDS or any(tensor is None or tensor.dim() != 4 for tensor in tensors):
        return False
    if all(tensor.is_contiguous() for tensor in tensors[:2] if tensor is not None):
        return False
    image, weight = (calls.shape_of(tensor) for tensor in tensors[1:] if tensor is not None)
    is_depthwise, window = _is_depthwise(node), prod(weight[2:])
    if window <= (DIRECT if is_depthwise else 1):
        return False
    return prod(weight) * (WORKSPACE if is_depthwise else COPIES) > MOST * prod(image)


def _replace(node: fx.Node) -> None:
    images = [_contiguous(node, image) for image in node.args[:2]]  # type: ignore[arg-type]
    new = insert_call(node, node.target, *images, *node.args[2:])  # type: ignore[arg-type]
    results: list[fx.Node | None] = [None] * 3
    for user in node.users:
        place = user.args[1]
        assert isinstance(place, int)
        results[place] = result = insert_call(node, operator.getitem, new, place)
        if place == 0:
            # Readers of the input's gradient were planned for this layout.
            layout = torch.contiguous_format if user.meta["val"].is_contiguous() else torch.channels_last
            results[place] = insert_call(node, aten.clone.default, result, memory_format=layout)
    replace_results(node, results)


def _contiguous(before: fx.Node, operand: fx.Node) -> fx.Node:
    return insert_call(before, aten.clone.default, operand, memory_format=torch.contiguous_format)
