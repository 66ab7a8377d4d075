"""Operators that reduce a row and then use the result there: softmax, layer and RMS norm."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from math import prod

from tilewright.operators.arithmetic import (
    Arithmetic,
    CallSizes,
    Count,
    each,
    elements,
    nothing,
    of_argument,
    per_operand,
    wanted,
)
from tilewright.operators.language import Unfusable, Value, call, where
from tilewright.operators.row import Call, Traffic, body, calls
from tilewright.operators.shapes import Axes, CallAxes, Result, like, same

softmaxes = partial(body, operator_class="reduction", arithmetic=per_operand(4, 1), shapes=same)


@softmaxes("_softmax.default(self, dim, half_to_float)", role="softmax")
def softmax(c: Call, x: Value, dim: int, half_to_float: bool) -> Value:
    e = call("exp", x - x.max(dim))
    return e / e.sum(dim)


@softmaxes("_safe_softmax.default(self, dim, dtype)", role="softmax")
def safe_softmax(c: Call, x: Value, dim: int, dtype: object = None) -> Value:
    """Softmax, but zeros where a whole row is -inf."""
    top = x.max(dim)
    e = call("exp", x - top)
    return where(top.eq(-math.inf), 0, e / e.sum(dim))


@body(
    "_softmax_backward_data.default(grad_output, output, dim, input_dtype)",
    operator_class="reduction",
    arithmetic=per_operand(4),
)
def softmax_backward(c: Call, g: Value, y: Value, dim: int, dtype: object) -> Value:
    return y * (g - (g * y).sum(dim))


@softmaxes("_log_softmax.default(self, dim, half_to_float)")
def log_softmax(c: Call, x: Value, dim: int, half_to_float: bool) -> Value:
    shifted = x - x.max(dim)
    return shifted - call("log", call("exp", shifted).sum(dim))


@body(
    "_log_softmax_backward_data.default(grad_output, output, dim, input_dtype)",
    operator_class="reduction",
    arithmetic=per_operand(3, 1),
)
def log_softmax_backward(c: Call, g: Value, y: Value, dim: int, dtype: object) -> Value:
    return g - call("exp", y) * g.sum(dim)


# Norms: their FLOPs, and how their axes follow.


def affine(sizes: CallSizes) -> int:
    """1 for the weight and 1 for the bias, where there are any."""
    return sum(sizes.shape(name) is not None for name in ("weight", "bias"))


def layer_norm_flops(sizes: CallSizes) -> Count:
    # Mean 1, variance 3, scaling 1.
    return elements(sizes.shape("input")) * (5 + affine(sizes))


def _layer_norm_backward_flops(sizes: CallSizes) -> Count:
    # x̂ takes 2. Towards the input 7 (two sums, a product, the combination), 1 with a weight.
    source, weight, bias = wanted(sizes, 3)
    per_element = 2 + source * (7 + (sizes.shape("weight") is not None)) + weight * 2 + bias
    return elements(sizes.shape("input")) * per_element


def _rms_norm_backward_flops(sizes: CallSizes) -> Count:
    source, weight = wanted(sizes, 2)
    per_element = 1 + source * (5 + (sizes.shape("weight") is not None)) + weight * 2
    return elements(sizes.shape("input")) * per_element


def roots_of_rows(sizes: CallSizes) -> Count:
    """One root for each row that is normalised."""
    return elements(sizes.result(1))


def _normalised(call: CallAxes) -> tuple[Axes, Axes, Axes]:
    """The axes of the operand, the statistics and the weight of a norm over trailing axes."""
    count = len(call.arguments["normalized_shape"])
    source = call.tensor("input")
    if (gradient := call.axes("grad_out")) is not None:
        source = call.broadcast(source, gradient)
    leading, trailing = source[: len(source) - count], source[len(source) - count :]
    for name in ("weight", "bias"):
        if (axes := call.axes(name)) is not None:
            trailing = tuple(map(call.names.unify, trailing, axes))
    return source, leading + ((),) * len(trailing), trailing


def _row_norm(call: CallAxes) -> Result:
    source, statistics, _ = _normalised(call)
    return [source, statistics, statistics]


def _row_norm_backward(call: CallAxes) -> Result:
    source, _, weight = _normalised(call)
    vectors = (weight if call.axes(name) is not None else None for name in ("weight", "bias"))
    return call.wanted(source, *vectors)


# x - mean cancels for nearly equal elements, so it depends on the rounding of x. The moments of forward meet the
# x of backward, which was in memory or is computed again: all of them must see eager's x.
norm = partial(body, operator_class="reduction", promotion="none", cancels=True)


def _last(x: Value, shape: Sequence[int]) -> list[int]:
    return list(range(len(x.dims) - len(shape), len(x.dims)))


def moments(c: Call, x: Value, dims: Sequence[int]) -> tuple[Value, Value, Value]:
    """The mean of `x` along `dims`, `x` less it, and the sum of the squares of that.

    If sums are calls of their own, both are from one pass over memory: squares of numbers of at most 24 bits are exact
    in double, so Σ² - n · mean² is accurate until mean² is 10⁸ times the variance.
    """
    count = prod(x.shape[d] for d in dims)
    if not c.apart:
        mean = x.sum(dims) / count
        centred = x - mean
        return mean, centred, (centred * centred).sum(dims)
    wide = x.to_compute("float64")
    mean = wide.sum(dims) / count
    squares = call("maximum", (wide * wide).sum(dims) - mean * mean * count, 0)
    mean = mean.to_compute(x.dtype)
    return mean, x - mean, squares


@norm(
    "native_layer_norm.default(input, normalized_shape, weight, bias, eps)",
    arithmetic=Arithmetic(layer_norm_flops, roots_of_rows),
    shapes=_row_norm,
    dtypes=("input", "statistic", "statistic"),
    is_cheap_again=True,
    role="LN",
)
def layer_norm(
    c: Call, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    mean, centred, squares = moments(c, x, _last(x, shape))
    rstd = call("rsqrt", squares / prod(shape) + eps).to_compute(x.dtype)
    y = centred * rstd
    if weight is not None:
        y = y * weight.to_compute(c.dtype)
    if bias is not None:
        y = y + bias.to_compute(c.dtype)
    return y, mean, rstd


@norm(
    "native_layer_norm_backward.default(grad_out, input, normalized_shape, mean, rstd, weight, bias, output_mask)",
    arithmetic=Arithmetic(_layer_norm_backward_flops, nothing),
    shapes=_row_norm_backward,
    dtypes=("input", "weight", "weight"),
    traffic=Traffic(unread=("bias",)),
)
def layer_norm_backward(
    c: Call,
    g: Value,
    x: Value,
    shape: Sequence[int],
    mean: Value,
    rstd: Value,
    weight: Value | None,
    bias: Value | None,
    wanted: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    dims, count = _last(x, shape), prod(shape)
    rows = list(range(len(x.dims) - len(shape)))
    normal = (x - mean if count > 1 else x * 0) * rstd
    scaled = g if weight is None else g * weight.to_compute(g.dtype)
    # One element is its own mean: what rounding leaves of x - mean would be all there is.
    centred = scaled - scaled.sum(dims) / count if count > 1 else scaled * 0
    dx = rstd * (centred - normal * ((scaled * normal).sum(dims) / count))
    dw = (g * normal).sum(rows, keepdim=False)
    db = g.sum(rows, keepdim=False)
    return tuple(v if want else None for v, want in zip((dx, dw, db), wanted, strict=True))  # type: ignore[return-value]


@norm(
    "_fused_rms_norm.default(input, normalized_shape, weight, eps)",
    arithmetic=Arithmetic(lambda sizes: elements(sizes.shape("input")) * (3 + affine(sizes)), roots_of_rows),
    shapes=_row_norm,
    dtypes=("input", "statistic"),
    is_cheap_again=True,
    role="RMS norm",
)
def rms_norm(c: Call, x: Value, shape: Sequence[int], weight: Value | None, eps: float | None) -> tuple[Value, Value]:
    dims, count = _last(x, shape), prod(shape)
    smallest = {"float64": 2.220446049250313e-16}.get(c.dtype, 1.1920928955078125e-07)
    rstd = call("rsqrt", (x * x).sum(dims) / count + (smallest if eps is None else eps))
    y = x * rstd
    return (y if weight is None else y * weight.to_compute(c.dtype)), rstd


@norm(
    "_fused_rms_norm_backward.default(grad_out, input, normalized_shape, rstd, weight, output_mask)",
    arithmetic=Arithmetic(_rms_norm_backward_flops, nothing),
    shapes=_row_norm_backward,
    dtypes=("input", "weight"),
)
def rms_norm_backward(
    c: Call, g: Value, x: Value, shape: Sequence[int], rstd: Value, weight: Value | None, wanted: Sequence[bool]
) -> tuple[Value | None, Value | None]:
    dims, count = _last(x, shape), prod(shape)
    rows = list(range(len(x.dims) - len(shape)))
    normal = x * rstd
    scaled = g if weight is None else g * weight.to_compute(g.dtype)
    dx = rstd * (scaled - normal * ((scaled * normal).sum(dims) / count))
    dw = (g * normal).sum(rows, keepdim=False)
    return (dx if wanted[0] else None), (dw if wanted[1] and weight is not None else None)


# Weight norm: each slice of v along `dim` scaled to the length g.


def _of_slice(c: Call, v: Value, dim: int) -> list[int]:
    """The dimensions of a slice. One kernel that sums columns, then scales them, reads the weight far apart twice."""
    if dim % len(v.dims) != 0 and not c.apart:
        raise Unfusable("it normalises the columns of a weight, not its rows")
    return [d for d in range(len(v.dims)) if d != dim % len(v.dims)]


@body(
    "_weight_norm_interface.default(v, g, dim)",
    operator_class="reduction",
    promotion="none",
    arithmetic=Arithmetic(lambda sizes: 3 * elements(sizes.shape("v")), lambda sizes: elements(sizes.shape("g"))),
    shapes=like("v", "g"),
    dtypes=("v", "g"),
)
def weight_norm(c: Call, v: Value, g: Value, dim: int = 0) -> tuple[Value, Value]:
    norms = call("sqrt", (v * v).sum(_of_slice(c, v, dim)))
    return v * (g / norms), norms


@body(
    "_weight_norm_interface_backward.default(grad_w, saved_v, saved_g, saved_norms, dim)",
    operator_class="reduction",
    promotion="none",
    arithmetic=each(of_argument("saved_v"), 5),
    shapes=like("saved_v", "saved_g"),
    dtypes=("saved_v", "saved_g"),
)
def weight_norm_backward(c: Call, dw: Value, v: Value, g: Value, norms: Value, dim: int) -> tuple[Value, Value]:
    """Towards v, what of dw is along v does not count: w's length is g whatever v's is."""
    dg = (dw * v).sum(_of_slice(c, v, dim)) / norms
    scale = g / norms
    return scale * dw - (scale * dg / norms) * v, dg


def _group_norm_backward(call: CallAxes) -> Result:
    weight = call.tensor("input")[1:2]
    return call.wanted(call.tensor("input"), weight, weight)


calls(
    "native_group_norm_backward.default(grad_out, input, mean, rstd, weight, N, C, HxW, group, output_mask)",
    "library",
    arithmetic=each(of_argument("input"), 11),
    shapes=_group_norm_backward,
    dtypes=("input", "weight", "weight"),
)
