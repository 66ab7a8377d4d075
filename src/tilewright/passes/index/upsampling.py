"""The gradient of `interpolate` is computed by gathers, not by scatters with atomics.

    y = interpolate(x, scale_factor=2)               →   the same, with dx = upsample_nearest2d_backward(dy, …)
    y = interpolate(x, (64, 96), mode="bilinear")    →   the same, with dx = along(along(dy, height), width)

PyTorch decomposes `interpolate` into gathers, whose gradients are scatters: 293 of 311 ms of SegFormer's training step
(H200). Here each element of the gradient sums the few results that read it (`operators/upsampling.py`), in linear modes
along one axis after the other. Other modes, `nearest` to sizes that are not multiples, and elements that many results
read use library calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tilewright.graph.canonical import argument, example, static
from tilewright.graph.insert import insert_like
from tilewright.kernels.device import at_least_fp32
from tilewright.operators.upsampling import MOST_READERS, Axis
from tilewright.passes.rule import call, rule

aten: Any = torch.ops.aten
LINEAR = ("linear", "bilinear", "trilinear")
NEAREST = ("nearest", "nearest-exact")
OPERATORS = {mode: f"upsample_{mode}{{}}d_backward" for mode in (*LINEAR, "bicubic", "nearest")}
OPERATORS["nearest-exact"] = "_upsample_nearest_exact{}d_backward"
"""Eager's gradients of the modes whose axes are independent of each other; {} is the number of axes."""


@rule(call("interpolate", ...), where=lambda node: not argument(node, 6, "antialias", False))
def gather_gradients(node: fx.Node) -> fx.Node:
    _scale_as_eager(node)
    source, mode = argument(node, 0, "input"), argument(node, 3, "mode", "nearest")
    if mode != "area":
        _lay_out_as_eager(node)
    if mode in OPERATORS and (axes := _axes(source, node)) is not None:
        scales = tuple(axis.scale for axis in axes)
        node.target, node.args = resampled, (source, mode, axes[0].align_corners, _sizes(axes), scales)
        node.kwargs = {}
    return node


def _scale_as_eager(node: fx.Node) -> None:
    """Give the factors by which eager reads, where PyTorch's decomposition takes those that the caller gave."""
    x, y, given = example(argument(node, 0, "input")), example(node), argument(node, 2, "scale_factor")
    if x is None or y is None or given is None or argument(node, 5, "recompute_scale_factor"):
        return
    if not static((*x.shape, *y.shape)):
        return
    mode = argument(node, 3, "mode", "nearest")
    exact = _factors_by_size(x, y, mode)
    factors = given if isinstance(given, (list, tuple)) else [given] * (x.dim() - 2)
    ends = zip(x.shape[2:], y.shape[2:], factors, strict=True)
    read = [next((float(n) for n in exact if places == n * size), factor) for size, places, factor in ends]
    options = {"mode": mode, "align_corners": argument(node, 4, "align_corners")}
    node.args, node.kwargs = (), {"input": argument(node, 0, "input"), "scale_factor": read, **options}


def _lay_out_as_eager(node: fx.Node) -> None:
    """Copy results along one axis: eager's are contiguous, those of PyTorch's decomposition lie as the input does."""
    y = example(node)
    if y is None or y.dim() != 3 or y.is_contiguous():
        return
    copy = insert_like(node.next, node, "contiguous", y.contiguous(), node)
    node.replace_all_uses_with(copy, delete_user_cb=lambda user: user is not copy)


def _factors_by_size(x: Tensor, y: Tensor, mode: str) -> tuple[int, ...]:
    """The factors between an axis' sizes at which eager's kernels read it by this factor, whatever factor was given:
    1 copies the axis, 2 repeats each element.
    """
    is_image = x.dim() == 4
    if x.device.type != "cpu":
        return (1,) if is_image and mode in NEAREST else ()
    if mode != "nearest" or not is_image:
        return (1,) if mode in LINEAR else ()
    # One of ATen's two kernels does, for few results and for channels-last images.
    is_last = x.is_contiguous(memory_format=torch.channels_last) and x.shape[1] > 3
    return (1, 2) if is_last or y.shape[2] + y.shape[3] <= 128 else ()


def _axes(source: Any, node: fx.Node) -> tuple[Axis, ...] | None:
    """The spatial axes of an `interpolate`; None if the input needs no gradient, or a size is unknown."""
    x, y = example(source), example(node)
    if x is None or y is None or not x.requires_grad or x.dim() not in (3, 4, 5):
        return None
    if not all(isinstance(size, int) and size for size in (*x.shape, *y.shape)):
        return None
    scale = None if argument(node, 5, "recompute_scale_factor") else argument(node, 2, "scale_factor")
    scales = scale if isinstance(scale, (list, tuple)) else [scale] * (x.dim() - 2)
    if not all(one is None or isinstance(one, (int, float)) for one in scales):
        return None
    corners = bool(argument(node, 4, "align_corners"))
    ends = zip(x.shape[2:], y.shape[2:], scales, strict=True)
    return tuple(Axis(size, places, corners, factor and float(factor)) for size, places, factor in ends)


def _sizes(axes: Sequence[Axis]) -> tuple[int, ...]:
    return tuple(axis.places for axis in axes)


class _Resampled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mode: str, axes: Sequence[Axis]) -> Tensor:
        ctx.mode, ctx.axes, ctx.shape = mode, axes, x.shape
        if not any(axis.changes for axis in axes):
            return x.clone()
        options: dict[str, Any] = {} if mode in NEAREST else {"align_corners": axes[0].align_corners}
        scales = [axis.scale for axis in axes if axis.scale is not None]
        sizes = {"scale_factor": scales} if scales else {"size": list(_sizes(axes))}
        return F.interpolate(x, **sizes, mode=mode, **options)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (g,) = gradients
        if not any(axis.changes for axis in ctx.axes):
            return g.clone(), None, None
        if ctx.mode not in LINEAR or any(axis.readers[-1] > MOST_READERS for axis in ctx.axes):
            return _by_pytorch(g, ctx.mode, ctx.shape, ctx.axes), None, None
        total = at_least_fp32(g)
        for number, axis in enumerate(ctx.axes):
            if axis.changes:
                total = _along(total, number + 2, axis)
        return total.to(g.dtype), None, None


def _by_pytorch(g: Tensor, mode: str, shape: Sequence[int], axes: Sequence[Axis]) -> Tensor:
    operator = getattr(aten, OPERATORS[mode].format(len(axes))).default
    corners = () if mode in NEAREST else (axes[0].align_corners,)
    scales = (axis.scale for axis in axes)
    found: Tensor = operator(g, list(_sizes(axes)), list(shape), *corners, *scales)
    return found


def _along(g: Tensor, dim: int, axis: Axis) -> Tensor:
    """The gradient along axis `dim` of [N, C, …, places, …], computed as a bilinear one that keeps its other axis."""
    shape = list(g.shape)
    is_image = g.dim() == 4
    seen = g if is_image else g.reshape(shape[0], prod(shape[1:dim]), shape[dim], prod(shape[dim + 1 :]))
    place = dim if is_image else 2
    large, small = list(seen.shape[2:]), list(seen.shape)
    scales: list[float | None] = [None, None]
    small[place], scales[place - 2] = axis.size, axis.scale
    found: Tensor = aten.upsample_bilinear2d_backward.default(seen, large, small, axis.align_corners, *scales)
    shape[dim] = axis.size
    return found if is_image else found.view(shape)


def resampled(
    x: Tensor, mode: str, align_corners: bool, sizes: Sequence[int], scales: Sequence[float | None]
) -> Tensor:
    """`interpolate` of [N, C, …] to [N, C, *sizes]."""
    ends = zip(x.shape[2:], sizes, scales, strict=True)
    axes = [Axis(size, places, align_corners, scale) for size, places, scale in ends]
    result: Tensor = _Resampled.apply(x, mode, axes)  # type: ignore[no-untyped-call]
    return result
