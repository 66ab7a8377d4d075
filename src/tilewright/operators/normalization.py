"""Operators that reduce a row or a channel and then use the result there: softmax, layer, RMS and batch norm."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from tilewright.operators.language import Unfusable, Value, call
from tilewright.operators.row import Call, body


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


# Of two nearly equal elements, what is left of x - mean hangs on the rounding of x. The moments of forward meet the
# x of backward, which was in memory or is computed again: all of them must see eager's x.


def _last(x: Value, shape: Sequence[int]) -> list[int]:
    return list(range(len(x.dims) - len(shape), len(x.dims)))


@body("native_layer_norm.default", operator_class="reduction", promotion="none", discontinuous=True)
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


@body("native_layer_norm_backward.default", operator_class="reduction", promotion="none", discontinuous=True)
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


@body("_fused_rms_norm.default", operator_class="reduction", promotion="none", discontinuous=True)
def rms_norm(c: Call, x: Value, shape: Sequence[int], weight: Value | None, eps: float | None) -> tuple[Value, Value]:
    dims, count = _last(x, shape), prod(shape)
    smallest = {"float64": 2.220446049250313e-16}.get(c.dtype, 1.1920928955078125e-07)
    rstd = call("rsqrt", (x * x).sum(dims) / count + (smallest if eps is None else eps))
    y = x * rstd
    return (y if weight is None else y * weight.to_compute(c.dtype)), rstd


@body("_fused_rms_norm_backward.default", operator_class="reduction", promotion="none", discontinuous=True)
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


def _along_channels(x: Value, statistic: Value) -> Value:
    """A value [C] that meets `x` [N, C, …] at its second dimension."""
    return statistic.view([1, x.shape[1], *[1] * (len(x.dims) - 2)])


def _but_channels(x: Value) -> list[int]:
    return [d for d in range(len(x.dims)) if d != 1]


def _normalised(c: Call, centred: Value, rstd: Value, weight: Value | None, bias: Value | None) -> Value:
    """centred · (rstd · weight) + bias, one factor a channel as in eager; all but `centred` [N, C, …] are [C]."""
    scale = rstd if weight is None else rstd * weight.to_compute(c.dtype)
    y = centred * _along_channels(centred, scale)
    return y if bias is None else y + _along_channels(y, bias.to_compute(c.dtype))


@body("_native_batch_norm_legit_no_training.default", promotion="none")
def batch_norm_inference(
    c: Call,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    momentum: float,
    eps: float,
) -> tuple[Value, None, None]:
    rstd = call("rsqrt", running_var.to_compute(c.dtype) + eps)
    centred = x - _along_channels(x, running_mean.to_compute(c.dtype))
    return _normalised(c, centred, rstd, weight, bias), None, None


@body("_native_batch_norm_legit_functional.default", operator_class="reduction", promotion="none", discontinuous=True)
def batch_norm(
    c: Call,
    x: Value,
    weight: Value | None,
    bias: Value | None,
    running_mean: Value,
    running_var: Value,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Value, Value, Value, Value, Value]:
    dims = _but_channels(x)
    count = prod(x.shape[d] for d in dims)
    if not training or count == 1:
        raise Unfusable("a batch norm of given moments, or of one element a channel")
    mean = x.sum(dims) / count
    centred = x - mean
    squares = (centred * centred).sum(dims)
    rstd = call("rsqrt", squares / count + eps)
    mean, rstd, squares = (statistic.view([x.shape[1]]) for statistic in (mean, rstd, squares))
    y = _normalised(c, centred, rstd, weight, bias)
    # The running variance is that of the whole, which a sample of `count` underestimates.
    moments = ((running_mean, mean), (running_var, squares / (count - 1)))
    running = (old * (1 - momentum) + new.to_compute(old.dtype) * momentum for old, new in moments)
    return y, mean, rstd, *running  # type: ignore[return-value]


@body("native_batch_norm_backward.default", operator_class="reduction", promotion="none", discontinuous=True)
def batch_norm_backward(
    c: Call,
    g: Value,
    x: Value,
    weight: Value | None,
    running_mean: Value | None,
    running_var: Value | None,
    mean: Value,
    rstd: Value,
    training: bool,
    eps: float,
    wanted: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    if not training:
        raise Unfusable("the moments of a batch norm in evaluation are not those of its batch")
    dims = _but_channels(x)
    count = prod(x.shape[d] for d in dims)
    normal = (x - _along_channels(x, mean)) * _along_channels(x, rstd)
    db, dw = g.sum(dims), (g * normal).sum(dims)
    scale = _along_channels(x, rstd if weight is None else rstd * weight.to_compute(rstd.dtype))
    dx = (g - db / count - normal * (dw / count)) * scale
    flat = (dx, *(total.view([x.shape[1]]) for total in (dw, db)))
    return tuple(v if want else None for v, want in zip(flat, wanted, strict=True))  # type: ignore[return-value]
