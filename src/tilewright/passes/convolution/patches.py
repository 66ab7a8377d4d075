"""On a GPU, convolutions over patches that do not overlap (the first layer of a vision transformer) become matrix
products.

    y = conv2d(x, w, b, 16)   →   patches = x.reshape(B, 3, H/16, 16, W/16, 16).permute(0, 2, 4, 1, 3, 5)
                                  rows = linear(patches.reshape(-1, 768), w.reshape(D, 768), b)
                                  y = rows.reshape(B, H/16, W/16, D).permute(0, 3, 1, 2).contiguous()

Only if the number of channels is no multiple of 8, when cuDNN pads the channels and converts the layout. On an H200, in
bf16, 64 images of 224 x 224 in patches of 16 took 570 us forward and 391 backward; 12544 x 768 x 768 is predicted to
take 24.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tilewright.cost.convolutions import ALIGNED
from tilewright.graph.canonical import argument, convolution_operands, example, static
from tilewright.kernels.device import NARROW
from tilewright.passes.attention.spelling import tensor_of
from tilewright.passes.attention.writer import Writer
from tilewright.passes.convolution.memory_formats import lies_channels_last
from tilewright.passes.rule import call, gpu, rule


def _is_of_patches(node: fx.Node) -> bool:
    """Whether this cuts 16-bit images into patches, with a number of channels that 8 does not divide."""
    x, weight, result = (example(one) for one in (*convolution_operands(node)[:2], node))
    if x is None or weight is None or result is None or x.dim() != 4 or result.dtype not in NARROW:
        return False
    if not static((*x.shape, *weight.shape)) or weight.shape[1] % ALIGNED == 0 or argument(node, 6, "groups", 1) != 1:
        return False
    window = tuple(weight.shape[2:])
    is_cut = _pair(argument(node, 3, "stride", 1)) == window and x.shape[2] % window[0] == x.shape[3] % window[1] == 0
    is_plain = argument(node, 4, "padding", 0) in (0, (0, 0), [0, 0], "valid") and (
        _pair(argument(node, 5, "dilation", 1)) == (1, 1)
    )
    return is_cut and is_plain and (result.is_contiguous() or lies_channels_last(result))


def _pair(number: Any) -> tuple[int, ...]:
    return tuple(number) if isinstance(number, (tuple, list)) else (number, number)


@rule(call("conv2d", ...), on=gpu, where=_is_of_patches)
def multiply_patches(node: fx.Node) -> fx.Node:
    x, weight, bias = convolution_operands(node)
    (batch, channels, height, width), (made, _, *window) = example(x).shape, example(weight).shape  # type: ignore[union-attr]
    down, across = height // window[0], width // window[1]
    write, value = Writer(node.graph, node), tensor_of(node)
    with torch.enable_grad():
        cut = write.call(torch.reshape, x, (batch, channels, down, window[0], across, window[1]))
        patches = write.call(torch.permute, cut, (0, 2, 4, 1, 3, 5))
        rows = write.call(torch.reshape, patches, (batch * down * across, channels * window[0] * window[1]))
        flat = write.call(torch.reshape, weight, (made, channels * window[0] * window[1]))
        product = write.call(torch.nn.functional.linear, rows, flat, bias)
        # Under autocast the operands have another dtype than the result.
        product.meta["example_value"] = tensor_of(product).to(value.dtype)
        image = write.call(torch.reshape, product, (batch, down, across, made))
        result = write.call(torch.permute, image, (0, 3, 1, 2))
        if value.is_contiguous():
            result = write.method("contiguous", result)
    return result
