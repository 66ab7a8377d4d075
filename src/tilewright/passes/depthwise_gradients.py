"""Gradients of depthwise convolutions on a CPU whose window is larger than the image read contiguous tensors.

    dx, dw, db = convolution_backward(g, x, w, …)   →   dx, dw, db = convolution_backward(g.clone(), x.clone(), w, …)

oneDNN takes channels-last tensors apart into matrices of windows there, of all channels by all channels: with 7 × 7 of
2 × 2 pixels and 128 channels 6.4 MB and 480 µs, contiguous 0.1 MB and 255 µs. With larger images (8 × 8) it does not:
229 µs, contiguous 280.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import insert_call, replace_results
from tilewright.hardware.target import Target

aten = torch.ops.aten
OPERANDS = 3
"""The first arguments: the gradient of the result, the input, the weight."""


def read_contiguous(graph: fx.Graph, target: Target) -> None:
    """Rewrite `graph`, a joint graph of ATen operators, in place."""
    if target.is_gpu:
        return
    for node in graph.find_nodes(op="call_function", target=aten.convolution_backward.default):
        if _is_wider_than_the_image(node):
            _replace(node)


def _is_wider_than_the_image(node: fx.Node) -> bool:
    """Whether a channel has a window of its own, of more elements than its image."""
    tensors = [calls.output(operand) for operand in node.all_input_nodes[:OPERANDS]]
    if len(tensors) < OPERANDS or any(tensor is None or tensor.dim() != 4 for tensor in tensors):
        return False
    image, window = (calls.shape_of(tensor)[-2:] for tensor in tensors[1:] if tensor is not None)
    groups = node.args[9]
    is_depthwise = calls.shape_of(tensors[2])[:2] == (groups, 1)  # type: ignore[arg-type]
    return is_depthwise and image[0] * image[1] < window[0] * window[1]


def _replace(node: fx.Node) -> None:
    operands = [_contiguous(node, operand) for operand in node.args[:OPERANDS]]  # type: ignore[arg-type]
    new = insert_call(node, node.target, *operands, *node.args[OPERANDS:])  # type: ignore[arg-type]
    results: list[fx.Node | None] = [None] * 3
    for user in node.users:
        place = user.args[1]
        assert isinstance(place, int)
        results[place] = result = insert_call(node, operator.getitem, new, place)
        if place == 0:
            # What reads the gradient of the input was planned for that layout.
            layout = torch.contiguous_format if user.meta["val"].is_contiguous() else torch.channels_last
            results[place] = insert_call(node, aten.clone.default, result, memory_format=layout)
    replace_results(node, results)


def _contiguous(before: fx.Node, operand: fx.Node) -> fx.Node:
    return insert_call(before, aten.clone.default, operand, memory_format=torch.contiguous_format)
