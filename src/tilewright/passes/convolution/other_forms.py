"""On a GPU, convolutions in another form: as images, as products, with the bias apart, generated. Figures: an H200.

    y = conv1d(x, w, b, 2, padding=1)   →   y = conv2d(x[:, :, None], w[:, :, None], b, (1, 2), (0, 1))[:, :, 0]

In 16 bits: PyTorch makes operands contiguous, so that cuDNN converts them and the result to channels-last and back
(34 % of a net of dilated convolutions). As images they get their layout from `channels_last`. Depthwise ones stay:
cuDNN has no fast channels-last kernel for long windows of one row.

    y = conv2d(x, w, b, 16)   →   patches = x.reshape(B, 3, H/16, 16, W/16, 16).permute(0, 2, 4, 1, 3, 5)
                                  rows = linear(patches.reshape(-1, 768), w.reshape(D, 768), b)
                                  y = rows.reshape(B, H/16, W/16, D).permute(0, 3, 1, 2).contiguous()

Patches that do not overlap, as of a vision transformer, in 16 bits. Only if 8 does not divide the number of channels:
cuDNN then pads the channels and converts the layout (64 images of 224 × 224: 570 µs forward, the product 24).

    y = convolution(x, w, b)                   →   y = convolution(x, w) + b
    dx, dw, db = convolution_backward(g, …)    →   dx, dw = convolution_backward(g, …); db = Σ g

Neighbouring kernels then add the bias and sum its gradient, which PyTorch does in kernels of their own: 7 % of a
U-Net's inference.

    y = relu6(convolution(x, w, groups=C) · s + b)   →   y = relu6(depthwise_convolution(x, w) · s + b)   in one kernel

Small windows, unless the channels are last in memory: cuDNN has a fast kernel for that layout alone, and converting
takes more than the convolution (3 × 3 over 16 × 64 × 512 × 512 in fp32: 1,811 µs, generated 700). On the partitioned
graphs, so that gradients stay PyTorch's.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx import Node

from tilewright.cost.products import ALIGNED
from tilewright.graph.canonical import argument, canonical_name, convolution_operands, example, static, tensor_of
from tilewright.graph.insert import Writer, insert_again, insert_call, insert_known, insert_like, replace
from tilewright.graph.layouts import lies_channels_last
from tilewright.kernels.device import NARROW
from tilewright.kernels.registration import define
from tilewright.operators.pooling import MOST_ELEMENTS
from tilewright.passes.rule import Value, call, gpu, rule

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
        image = insert_like(node, node, IN_ROWS[name], value.unsqueeze(2), *operands, bias, **given)
        row = write.method("squeeze", image, 2)
    row.meta["example_value"] = value
    return row


def _in_two_dimensions(number: Any, along: int) -> Any:
    """A 2-D argument: `along` for the height, `number` for the width; "same" and "valid" stay."""
    if isinstance(number, str):
        return number
    return along, number[0] if isinstance(number, (tuple, list)) else number


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


aten = torch.ops.aten
MASK = 10
"""Position of a convolution's output mask among the arguments of its backward."""


@rule(
    (
        call(aten.convolution.default, "x", "weight", "bias", ...),
        call(aten.convolution_backward.default, "gradient", ..., output_mask=lambda mask: mask[2]),
    ),
    on=gpu,
)
def split_bias(node: Node, bias: Node | None = None, gradient: Node | None = None) -> Node:
    return _added_apart(node, bias) if gradient is None else _summed_apart(node, gradient)


def _added_apart(node: Node, bias: Any) -> Node:
    bare = insert_again(node, node, *node.args[:2], None)
    along = insert_call(node, aten.view.default, bias, [-1, *[1] * (node.meta["val"].dim() - 2)])
    return insert_call(node, aten.add.Tensor, bare, along)


def _summed_apart(node: Node, gradient: Node) -> Node:
    dims = [d for d in range(gradient.meta["val"].dim()) if d != 1]
    for user in [user for user in node.users if user.target is operator.getitem and user.args[1] == 2]:
        replace(user, insert_call(user, aten.sum.dim_IntList, gradient, dims))
    mask: Any = node.args[MASK]
    node.update_arg(MASK, [*mask[:2], False])
    node.meta["val"] = (*node.meta["val"][:2], None)
    return node


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
