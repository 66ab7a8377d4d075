"""On a GPU, a generated kernel converts operands of a channels-last convolution that have another layout.

    g = cat([a, b], 1)[:, :, None]             [N, C, 1, L], contiguous: PyTorch knows no other format of sequences
    dx, dw = convolution_backward(g, x, w)   →   dx, dw = convolution_backward(g.clone(channels_last), x, w)

PyTorch would copy the gradient before the convolution: 191 µs for 67 MB on an H200, three times what the traffic takes.
The copy is written by the kernel that computes the gradient, and all other readers use it too.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tilewright.graph.insert import insert_call
from tilewright.passes.convolution.memory_formats import FORMATS, lies_channels_last
from tilewright.passes.rule import call, gpu, rule

aten = torch.ops.aten
OPERANDS: dict[Any, int] = {aten.convolution.default: 2, aten.convolution_backward.default: 3}
"""How many arguments are tensors: the result's gradient, then the input and the weight, which determine the format."""


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
