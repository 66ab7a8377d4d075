"""On a GPU, 1-D convolutions of 16-bit floats become 2-D convolutions of images with one row.

    y = conv1d(x, w, b, 2, padding=1)   →   y = conv2d(x[:, :, None], w[:, :, None], b, (1, 2), (0, 1))[:, :, 0]

PyTorch does the same, but first makes each operand contiguous, so that cuDNN converts every operand and result to
channels-last and back (34 % of a net of dilated convolutions on an H200). As 2-D convolutions they get their layout
from `channels_last`. Depthwise ones stay: cuDNN has no fast channels-last kernel for long windows of one row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tilewright.graph.canonical import argument, canonical_name, convolution_operands, example
from tilewright.kernels.device import NARROW
from tilewright.passes.attention.spelling import tensor_of
from tilewright.passes.attention.writer import Writer
from tilewright.passes.rule import call, gpu, rule

IN_ROWS: dict[str, Callable[..., torch.Tensor]] = {"conv1d": torch.conv2d, "conv_transpose1d": torch.conv_transpose2d}
NUMBERS = {"stride": (3, 1, 1), "padding": (4, 0, 0), "dilation": (5, 1, 1)}
"""Position in the call, default, and value along the axis of one row."""
TRANSPOSED = {"stride": (3, 1, 1), "padding": (4, 0, 0), "output_padding": (5, 0, 0), "dilation": (7, 1, 1)}


FAR = 16
"""From this dilation on, cuDNN has no fast channels-last kernel for the gradient of two taps of `MANY` weights: 512 ×
256 over 16 sequences of 4096 take 2119 µs, contiguous 282 (H200); three taps of 256 × 128 take 182 and 218."""
MANY = 2**17


def _is_suited(node: fx.Node) -> bool:
    """Whether this is a 1-D convolution of 16-bit floats that is not depthwise (nor too much dilated, see `FAR`)."""
    x, weight, result = (example(one) for one in (*convolution_operands(node)[:2], node))
    if x is None or weight is None or result is None or x.dim() != 3 or result.dtype not in NARROW:
        return False
    if (
        canonical_name(node) == "conv1d"
        and weight.requires_grad
        and weight.shape[2] == 2
        and weight[..., 0].numel() >= MANY
    ):
        _, dilation = _in_two_dimensions(argument(node, 5, "dilation", 1), 1)
        if dilation >= FAR:
            return False
    groups = argument(node, 6, "groups", 1)
    return groups == 1 or weight.shape[0 if canonical_name(node) == "conv_transpose1d" else 1] > 1


@rule(call(tuple(IN_ROWS), ...), on=gpu, where=_is_suited)
def convolve_as_images(node: fx.Node) -> fx.Node:
    name = canonical_name(node)
    assert name is not None
    is_transposed = name == "conv_transpose1d"
    given: dict[str, Any] = {
        name: _in_two_dimensions(argument(node, place, name, default), along)
        for name, (place, default, along) in (TRANSPOSED if is_transposed else NUMBERS).items()
    }
    given["groups"] = argument(node, 6, "groups", 1)
    write, value = Writer(node.graph, node), tensor_of(node)
    with torch.enable_grad():
        *operands, bias = convolution_operands(node)
        operands = [write.method("unsqueeze", operand, 2) for operand in operands]
        with node.graph.inserting_before(node):
            image = node.graph.call_function(IN_ROWS[name], (*operands, bias), given)
        image.meta = {**node.meta, "example_value": value.unsqueeze(2)}
        row = write.method("squeeze", image, 2)
    row.meta["example_value"] = value
    return row


def _in_two_dimensions(number: Any, along: int) -> Any:
    """A 2-D argument: `along` for the height, `number` for the width; "same" and "valid" stay."""
    if isinstance(number, str):
        return number
    return along, number[0] if isinstance(number, (tuple, list)) else number
