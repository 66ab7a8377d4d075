"""On a GPU, generated kernels compute convolutions of each channel with a small window of its own, with what stands
beside them, unless the channels are last in memory.

    y = relu6(convolution(x, w, groups=C) · s + b)   →   y = relu6(depthwise_convolution(x, w) · s + b)   in one kernel

cuDNN has a fast kernel for channels-last operands alone, and converting to it and back takes more than the convolution:
3 × 3 over 16 × 64 × 512 × 512 in fp32 took 1,811 µs on an H200, 704 of them the convolution; the generated kernel takes
700, and 560 in bf16. Channels last, cuDNN's are faster: a thread would hold the windows of several channels.

Runs on the partitioned graphs: gradients stay PyTorch's.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor, fx

from tilewright.graph.insert import insert_known
from tilewright.kernels.device import NARROW
from tilewright.kernels.registration import define
from tilewright.operators.pooling import MOST_ELEMENTS
from tilewright.passes.convolution.memory_formats import lies_channels_last
from tilewright.passes.rule import Value, call, gpu, rule

aten = torch.ops.aten
DTYPES = (*NARROW, torch.float32)


def is_small_and_depthwise(x: Tensor, weight: Tensor, groups: object) -> bool:
    """Whether the convolution of x [N, C, …] is one that a kernel is generated for, unless x is channels-last."""
    return (
        x.dim() == weight.dim() > 2
        and groups == x.shape[1] == weight.shape[0] > 1
        and weight.shape[1] == 1
        and prod(weight.shape[2:]) <= MOST_ELEMENTS
        and x.dtype in DTYPES
    )


def _convolution(
    x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> Tensor:
    """PyTorch's, of x [N, C, …] and weight [C, 1, …]."""
    result: Tensor = aten.convolution(x, weight, None, stride, padding, dilation, False, [0], x.shape[1])
    return result


define("depthwise_convolution", _convolution, _convolution)


def _is_generated(x: fx.Node, weight: fx.Node, groups: int) -> bool:
    operand = x.meta["val"]
    lies_so = operand.dim() > 3 and lies_channels_last(operand) and not operand.is_contiguous()
    return not lies_so and is_small_and_depthwise(operand, weight.meta["val"], groups)


GEOMETRY = tuple(map(Value, ("stride", "padding", "dilation")))


@rule(
    call(aten.convolution.default, "x", "weight", None, *GEOMETRY, False, Value("output_padding"), Value("groups")),
    on=gpu,
    where=_is_generated,
    reason="a generated kernel computes it, with its neighbours",
)
def generate_depthwise(
    node: fx.Node, x: fx.Node, weight: fx.Node, stride: list[int], padding: list[int], dilation: list[int]
) -> fx.Node:
    operator = torch.ops.tilewright.depthwise_convolution.default
    return insert_known(node, operator, node.meta["val"], x, weight, stride, padding, dilation)
