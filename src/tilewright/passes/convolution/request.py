"""A convolution as plain data, by which its layouts are raced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tilewright.graph.canonical import argument, canonical_name, example, static

CONVOLUTIONS = {
    **{f"conv{places}d": ("stride", "padding", "dilation", "groups") for places in (2, 3)},
    **{f"conv_transpose{places}d": ("stride", "padding", "output_padding", "groups", "dilation") for places in (2, 3)},
}
"""By function of `torch.nn.functional`, its arguments behind the bias, in their order."""
DEFAULTS = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Convolution:
    """What the time of a convolution depends on. `gradients`: of input and of weight, whether they are computed."""

    function: str
    input: tuple[Shape, Shape]
    """Sizes and strides."""
    weight: tuple[Shape, Shape]
    options: tuple[Any, ...]
    dtype: torch.dtype
    device: torch.device
    gradients: tuple[bool, bool]


def convolution_of(node: fx.Node) -> Convolution | None:
    """A call of torch's functions as data; None if a size is a symbol or an option is no number."""
    function = canonical_name(node) or ""
    x, weight, made = example(argument(node, 0, "input")), example(argument(node, 1, "weight")), example(node)
    if x is None or weight is None or made is None or not (static(x.shape) and static(weight.shape)):
        return None
    options = [argument(node, 3 + i, name, DEFAULTS[name]) for i, name in enumerate(CONVOLUTIONS[function])]
    if any(isinstance(number, fx.Node) for option in options for number in _numbers(option)):
        return None
    return Convolution(
        function,
        (tuple(x.shape), x.stride()),
        (tuple(weight.shape), weight.stride()),
        tuple(tuple(_numbers(option)) if isinstance(option, (list, tuple)) else option for option in options),
        made.dtype,
        made.device,
        (made.requires_grad and x.requires_grad, made.requires_grad and weight.requires_grad),
    )


def _numbers(option: Any) -> list[Any]:
    return list(option) if isinstance(option, (list, tuple)) else [option]
