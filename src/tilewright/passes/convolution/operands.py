"""Layouts of a convolution's operands.

On a GPU, a generated kernel converts operands of a channels-last convolution that have another layout.

    g = cat([a, b], 1)[:, :, None]             [N, C, 1, L], contiguous: PyTorch knows no other format of sequences
    dx, dw = convolution_backward(g, x, w)   →   dx, dw = convolution_backward(g.clone(channels_last), x, w)

PyTorch would copy the gradient before the convolution: 191 µs for 67 MB on an H200, three times what the traffic takes.
The copy is written by the kernel that computes the gradient, and all other readers use it too.

On a CPU the layout of its operands reduces the memory of a convolution's gradients.

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
from typing import Any

import torch
from torch import fx

from tilewright.graph import calls
from tilewright.graph.insert import contiguous, insert_call
from tilewright.passes.convolution.memory_formats import FORMATS, lies_channels_last
from tilewright.passes.rule import call, cpu, gpu, rule

aten = torch.ops.aten
OPERANDS: dict[Any, int] = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
"""How many arguments are tensors: the result's gradient, then the input and the weight, which determine the format."""
BACKWARD = OPERANDS[aten.convolution_backward.default]
DIRECT = 3 * 3
"""Elements of the largest depthwise window for which oneDNN needs no workspace."""
WORKSPACE, COPIES = 256, 3
"""Additional bytes per byte of the weight: oneDNN's workspace (depthwise); copies of the weight and its gradient."""
MOST = 16
"""Additional bytes per byte of the image from which contiguous copies pay; they take up to twice as long."""


@rule(call(tuple(OPERANDS), ...), on=gpu)
def lay_operands(node: fx.Node) -> fx.Node | None:
    operands = node.all_input_nodes[: OPERANDS[node.target]]
    others = [operand for operand in operands[:-1] if not lies_channels_last(operand.meta["val"])]
    if not others or not any(_asks_for_the_format(operand) for operand in operands[-2:]):
        return None
    for operand in others:
        _copy(operand)
    return node


def _asks_for_the_format(operand: fx.Node) -> bool:
    """Whether the strides are channels-last and not also contiguous, as those of 1 × 1 weights may be."""
    value = operand.meta["val"]
    is_known = all(isinstance(size, int) for size in value.shape)
    return is_known and value.dim() in FORMATS and lies_channels_last(value) and not value.is_contiguous()


def _copy(operand: fx.Node) -> None:
    readers = list(operand.users)
    form = FORMATS[operand.meta["val"].dim()]
    copy = insert_call(operand.next, aten.clone.default, operand, memory_format=form)
    for reader in readers:
        if reader.op != "output":
            reader.replace_input_with(operand, copy)


@rule(call(aten.convolution_backward.default, ...), on=cpu)
def lighten_gradients(node: fx.Node) -> fx.Node | list[fx.Node | None]:
    copies: list[Any] = [] if _is_depthwise(node) else node.all_input_nodes[1:BACKWARD]
    for copy in copies:
        if copy.target is aten.clone.default and copy.args[0].op == "placeholder":
            node.replace_input_with(copy, copy.args[0])
    return _on_contiguous(node) if _needs_much_more(node) else node


def _is_depthwise(node: fx.Node) -> bool:
    weight = calls.output(node.all_input_nodes[BACKWARD - 1])
    groups = calls.number(node.args[9])
    return weight is not None and groups != 1 and tuple(weight.shape[:2]) == (groups, 1)


def _needs_much_more(node: fx.Node) -> bool:
    """Whether channels-last operands need far more additional memory than their image has bytes."""
    tensors = [calls.output(operand) for operand in node.all_input_nodes[:BACKWARD]]
    if len(tensors) < BACKWARD or any(tensor is None or tensor.dim() != 4 for tensor in tensors):
        return False
    if all(tensor.is_contiguous() for tensor in tensors[:2] if tensor is not None):
        return False
    image, weight = (calls.shape_of(tensor) for tensor in tensors[1:] if tensor is not None)
    is_depthwise, window = _is_depthwise(node), prod(weight[2:])
    if window <= (DIRECT if is_depthwise else 1):
        return False
    return prod(weight) * (WORKSPACE if is_depthwise else COPIES) > MOST * prod(image)


def _on_contiguous(node: fx.Node) -> list[fx.Node | None]:
    """The results of the same call on contiguous images."""
    images = [contiguous(node, image) for image in node.args[:2]]  # type: ignore[arg-type]
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
    return results
