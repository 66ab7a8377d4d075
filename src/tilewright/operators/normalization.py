"""Operators that reduce a row and then use the result on that same row: softmax, layer norm, RMS norm."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilewright.operators.language import Value, call
from tilewright.operators.table import Call, body


@body("_softmax.default", operator_class="reduction")
def softmax(c: Call, x: Value, dim: int, half_to_float: bool) -> Value:
    e = call("exp", x - x.max(dim))
    return e / e.sum(dim)


@body("_softmax_backward_data.default", operator_class="reduction")
def softmax_backward(c: Call, g: Value, y: Value, dim: int, dtype: object) -> Value:
    return y * (g - (g * y).sum(dim))


@body("_log_softmax.default", operator_class="reduction")
def log_softmax(c: Call, x: Value, dim: int, half_to_float: bool) -> Value:
    shifted = x - x.max(dim)
    return shifted - call("log", call("exp", shifted).sum(dim))


@body("_log_softmax_backward_data.default", operator_class="reduction")
def log_softmax_backward(c: Call, g: Value, y: Value, dim: int, dtype: object) -> Value:
    return g - call("exp", y) * g.sum(dim)


def _last(x: Value, shape: Sequence[int]) -> list[int]:
    return list(range(len(x.dims) - len(shape), len(x.dims)))


@body("native_layer_norm.default", operator_class="reduction", promotion="none")
def layer_norm(
    c: Call, x: Value, shape: Sequence[int], weight: Value | None, bias: Value | None, eps: float
) -> tuple[Value, Value, Value]:
    dims, count = _last(x, shape), prod(shape)
    mean = x.sum(dims) / count
    centred = x - mean
    rstd = call("rsqrt", (centred * centred).sum(dims) / count + eps)
    y = centred * rstd
    if weight is not None:
        y = y * weight.to_compute(c.dtype)
    if bias is not None:
        y = y + bias.to_compute(c.dtype)
    return y, mean, rstd


@body("native_layer_norm_backward.default", operator_class="reduction", promotion="none")
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


@body("_fused_rms_norm.default", operator_class="reduction", promotion="none")
def rms_norm(c: Call, x: Value, shape: Sequence[int], weight: Value | None, eps: float | None) -> tuple[Value, Value]:
    dims, count = _last(x, shape), prod(shape)
    smallest = {"float64": 2.220446049250313e-16}.get(c.dtype, 1.1920928955078125e-07)
    rstd = call("rsqrt", (x * x).sum(dims) / count + (smallest if eps is None else eps))
    y = x * rstd
    return (y if weight is None else y * weight.to_compute(c.dtype)), rstd


@body("_fused_rms_norm_backward.default", operator_class="reduction", promotion="none")
def rms_norm_backward(
    c: Call,
    g: Value,
    x: Value,
    shape: Sequence[int],
    rstd: Value,
    weight: Value | None,
    wanted: Sequence[bool],
) -> tuple[Value | None, Value | None]:
    dims, count = _last(x, shape), prod(shape)
    rows = list(range(len(x.dims) - len(shape)))
    normal = x * rstd
    scaled = g if weight is None else g * weight.to_compute(g.dtype)
    dx = rstd * (scaled - normal * ((scaled * normal).sum(dims) / count))
    dw = (g * normal).sum(rows, keepdim=False)
    return (dx if wanted[0] else None), (dw if wanted[1] and weight is not None else None)
